import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.errors import BadRequest
from router.text.chat import ChatTemplate, TemplateFailed
from router.text.model_text import ModelText
from router.text.options import TemplateOptions
from router.text.tokenizer import Tokenizer
from tests.smollm2_text import NOON, smollm2_text, smollm2_tokenizer_folder

CHATS: Sequence[Sequence[dict[str, Any]]] = (
    [{"role": "user", "content": "Hi <b>there</b> & 'you' 🙂"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "  x\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|> c"},
    ],
)
TEMPLATES = (
    None,
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
    "  {% endif %}\n{% endfor %}{{ messages | tojson }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% endfor %}{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}"
    "{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking | default('off') }}",
)


@functools.cache
def smollm2_oracle() -> Any:
    return AutoTokenizer.from_pretrained(str(smollm2_tokenizer_folder()))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_prompts_equal_those_of_transformers(
    messages: Sequence[dict[str, Any]], template: str | None
) -> None:
    oracle = smollm2_oracle()
    source = oracle.chat_template if template is None else template
    ours = ChatTemplate(
        source, special_tokens=smollm2_text().tokenizer.special_tokens, local_time=lambda: NOON
    )
    theirs = oracle.apply_chat_template(
        list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ours.render(messages) == theirs


async def test_chat_ids_equal_those_of_transformers() -> None:
    oracle = smollm2_oracle()
    theirs = oracle.apply_chat_template(list(CHATS[2]), add_generation_prompt=True, return_dict=False)
    assert await smollm2_text().encode_chat(CHATS[2]) == tuple(theirs)


async def test_long_texts_have_the_same_ids_off_the_event_loop() -> None:
    text = "word " * 5000
    assert await smollm2_text().encode(text) == smollm2_text().tokenizer.encode(text, add_special_tokens=True)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, local_time=lambda: datetime(2024, 7, 26))  # noqa: DTZ001  only shown


def test_options_reach_the_template_and_may_not_replace_the_messages() -> None:
    assert (
        template("{{ enable_thinking }}").render([], TemplateOptions(variables={"enable_thinking": False}))
        == "False"
    )
    with pytest.raises(ValueError, match="chat_template_kwargs must not set 'messages'"):
        template("").render([], TemplateOptions(variables={"messages": []}))


@pytest.mark.parametrize("content", ["Sure, here is", "  Sure \n", "a"])
async def test_the_last_message_can_be_continued_as_transformers_does(content: str) -> None:
    messages = [{"role": "user", "content": "hi a"}, {"role": "assistant", "content": content}]
    theirs = smollm2_oracle().apply_chat_template(messages, tokenize=False, continue_final_message=True)
    continued = TemplateOptions(opens_answer=False, continues_last=True)
    ours = ChatTemplate(
        smollm2_oracle().chat_template,
        special_tokens=smollm2_text().tokenizer.special_tokens,
        local_time=lambda: NOON,
    )
    assert ours.render(messages, continued) == theirs


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateFailed, match="cannot be continued"):
        template("x").render([{"content": "y"}], TemplateOptions(opens_answer=False, continues_last=True))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateFailed):
        template(source).render([{"role": "user", "content": "x"}])


def test_the_date_is_the_one_it_is_given() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render([]) == "26 Jul 2024"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateFailed):
        template(source).render([{"role": "user", "content": "x"}])


async def test_a_model_without_template_takes_no_chat() -> None:
    text = ModelText(smollm2_text().tokenizer, template=None)
    with pytest.raises(BadRequest, match="no chat template"):
        await text.encode_chat(CHATS[0])


def write(folder: Path, **files: object) -> Path:
    source = smollm2_tokenizer_folder() / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_end_of_sequence_ids_come_from_the_generation_config_else_from_the_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"eos_token": {"content": "<|im_end|>", "special": True}})
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    write(tmp_path, generation_config={"eos_token_id": [0, 2]})
    assert Tokenizer.from_folder(folder).eos_token_ids == (0, 2)
    write(tmp_path, generation_config={"eos_token_id": 7})
    assert Tokenizer.from_folder(folder).eos_token_ids == (7,)


def test_the_template_named_default_is_taken_from_a_list(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder = write(tmp_path, tokenizer_config={"chat_template": templates})
    found = ChatTemplate.from_folder(folder, special_tokens={}, local_time=lambda: NOON)
    assert found is not None
    assert found.render([]) == "d"


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model folder must hold a tokenizer\.json, got '/"):
        Tokenizer.from_folder(tmp_path)


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = "import router.node, sys; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
