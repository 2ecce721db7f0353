from pathlib import Path

import pytest

from deploy import cli
from router.api_keys import ApiKeys, KeyEntry, digest, new_key, read_entries, single_entry
from router.errors import BadApiKey, RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, key: str, **limits: int) -> KeyEntry:
    return KeyEntry(name=name, sha256=digest(key), **limits)


def test_a_key_is_known_by_its_digest_and_names_its_user() -> None:
    keys = ApiKeys([entry("a", "key a"), entry("b", "key b")], clock=Clock())
    assert keys.user("Bearer key b").name == "b"
    assert keys.user("bearer  key a ").name == "a"


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer ", "Bearer key", "Basic key a", "key a", "Bearer ä"])
def test_anything_else_is_refused_without_being_shown(shown: str) -> None:
    keys = ApiKeys([entry("a", "key a")], clock=Clock())
    with pytest.raises(BadApiKey) as error:
        keys.user(shown)
    assert shown == "" or shown not in error.value.message or shown == "Bearer"


def test_without_keys_everybody_is_one_user_without_limits() -> None:
    user = ApiKeys(clock=Clock()).user("")
    for _ in range(1000):
        user.start()
        user.spend(10**6)
    assert user.name == ""


def test_requests_per_minute_come_back_evenly() -> None:
    clock = Clock()
    user = ApiKeys([entry("a", "k", requests_per_minute=2)], clock=clock).user("Bearer k")
    user.start()
    user.start()
    with pytest.raises(RateLimited, match="requests per minute") as error:
        user.start()
    assert error.value.retry_after_s == 30.0
    clock.now += 30.0
    user.start()
    with pytest.raises(RateLimited):
        user.start()


def test_a_part_of_a_request_is_none() -> None:
    clock = Clock()
    user = ApiKeys([entry("a", "k", requests_per_minute=1)], clock=clock).user("Bearer k")
    user.start()
    clock.now += 45.0
    with pytest.raises(RateLimited) as error:
        user.start()
    assert error.value.retry_after_s == 15.0
    clock.now += 15.0
    user.start()


def test_tokens_spent_are_waited_off() -> None:
    clock = Clock()
    user = ApiKeys([entry("a", "k", tokens_per_minute=60)], clock=clock).user("Bearer k")
    user.start()
    user.spend(69)
    with pytest.raises(RateLimited, match="tokens per minute") as error:
        user.start()
    assert error.value.retry_after_s == 10.0
    clock.now += 10.0
    user.start()


def test_a_user_s_limit_is_no_one_else_s() -> None:
    keys = ApiKeys([entry("a", "a", requests_per_minute=1), entry("b", "b")], clock=Clock())
    keys.user("Bearer a").start()
    with pytest.raises(RateLimited):
        keys.user("Bearer a").start()
    keys.user("Bearer b").start()


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 40


def test_a_file_and_a_single_key_go_together(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest("x").upper()}"\nrequests_per_minute = 5\n')
    found = read_entries(path, single_key="y")
    assert found == (entry("a", "x", requests_per_minute=5), *single_entry("y"))
    assert digest("x") not in repr(found)


GOOD = f'[[keys]]\nname = "a"\nsha256 = "{digest("x")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "api_keys_file must be TOML"),
        ("", "must hold a list"),
        ("keys = 3", "must hold a list"),
        (GOOD + '[other]\nname = "b"\n', "must hold a list"),
        (GOOD + GOOD, r"keys\[1\].name is used twice: 'a'"),
        (GOOD + 'key = "x"\n', r"keys\[0\] must have only name, .*got 'key'"),
        ('[[keys]]\nsha256 = "x"\n', r"keys\[0\].name must be set"),
        ('[[keys]]\nname = "a"\nsha256 = "secret"\n', r"keys\[0\].sha256 must be 64 hexadecimal digits"),
        (GOOD + "requests_per_minute = 1.5\n", r"keys\[0\].requests_per_minute must be int"),
        (GOOD + "tokens_per_minute = -1\n", r"keys\[0\].tokens_per_minute must be at least 0, got -1"),
        (GOOD + "weight = 0\n", r"keys\[0\].weight must be positive, got 0"),
        (GOOD + "weight = nan\n", r"keys\[0\].weight must be positive, got nan"),
        (GOOD + "weight = true\n", r"keys\[0\].weight must be int or float"),
        ("keys = [1]", r"keys\[0\] must be a table"),
        (GOOD + GOOD.replace('"a"', '"b"'), r"keys\[1\] is a key that is there already"),
    ],
)
def test_a_bad_file_is_refused_by_entry(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_entries(path)
    assert "secret" not in str(error.value)


def test_a_single_key_is_none_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD.replace('"a"', '"default"'))
    with pytest.raises(ValueError, match=r"api_key\.name is used twice: 'default'"):
        read_entries(path, single_key="y")
    path.write_text(GOOD)
    with pytest.raises(ValueError, match="api_key is a key that is there already") as error:
        read_entries(path, single_key="x")
    assert digest("x") not in str(error.value)


def test_weights_go_by_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD + "weight = 2.5\n")
    assert ApiKeys(read_entries(path, single_key="y"), clock=Clock()).weights == {"a": 2.5, "default": 1.0}


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match="api_keys_file must be readable, got 'nowhere'"):
        read_entries(Path("nowhere"))


def test_the_command_makes_a_key_and_the_entry_that_lets_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.key('team "a"')
    shown = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(shown.out)
    made = shown.err.split()[-1]
    assert made not in shown.out
    assert ApiKeys(read_entries(path), clock=Clock()).user(f"Bearer {made}").name == 'team "a"'
