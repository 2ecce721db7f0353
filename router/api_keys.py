"""The API keys users show: who they are, and how much each may ask for.

Owns the table of keys, which holds digests only, and the limits. Must never know HTTP or gRPC.
"""

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from router.errors import BadApiKey, RateLimited

_PREFIX = "sk-"
_FIELDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "name": (str,),
        "sha256": (str,),
        "requests_per_minute": (int,),
        "tokens_per_minute": (int,),
        "weight": (int, float),
    }
)
_REFUSAL = "the authorization header (or metadata) must carry one of this router's API keys as a bearer token"
_MINUTE_S = 60.0
_WHOLE = 1.0 - 1e-9  # refilled by fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """`sha256`: hexadecimal digest of the key. Limits of 0 mean none. `weight`: of its turn in the queue."""

    name: str
    sha256: str = field(repr=False)
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0


class Budget:
    """A token bucket: `per_minute` at once, refilled evenly. It may go into debt, which is waited off."""

    def __init__(self, per_minute: int, *, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._then = now

    def wait_s(self, *, now: float) -> float:
        """Seconds until a whole one is left; 0.0 when there is."""
        self._refill(now)
        if not self._per_minute or self._level >= _WHOLE:
            return 0.0
        return (1 - self._level) * _MINUTE_S / self._per_minute

    def charge(self, amount: int, *, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        gained = (now - self._then) * self._per_minute / _MINUTE_S
        self._level = min(self._level + gained, float(self._per_minute))
        self._then = now


class User:
    """One key's owner and what is left of its limits."""

    def __init__(self, entry: KeyEntry, *, clock: Callable[[], float]) -> None:
        self.name = entry.name
        self._clock = clock
        self._requests = Budget(entry.requests_per_minute, now=clock())
        self._tokens = Budget(entry.tokens_per_minute, now=clock())

    def start(self) -> None:
        """One more request. Raises RateLimited, which charges nothing."""
        now = self._clock()
        for what, budget in (("requests", self._requests), ("tokens", self._tokens)):
            if (wait_s := budget.wait_s(now=now)) > 0:
                raise RateLimited(f"this API key has used up its {what} per minute", retry_after_s=wait_s)
        self._requests.charge(1, now=now)

    def spend(self, num_tokens: int) -> None:
        """Tokens of a prompt or an answer, once they are known."""
        self._tokens.charge(num_tokens, now=self._clock())


class Bill:
    """What one request costs its user, which is what its usage says: every prompt once, whatever `n`, and the
    tokens of all answers.

    Enter it where the request is sent on: prompts are charged then, so that many at once are held to the
    limit too. They are given back when the request fails before its first token, as one that is refused
    does; who leaves before it pays for them.
    """

    def __init__(self, user: User, num_prompt_tokens: int) -> None:
        self._user = user
        self._num_prompt_tokens = num_prompt_tokens
        self._has_output = False

    def spend(self, num_tokens: int) -> None:
        """Tokens of an answer, once it is done with; 0 where only the prompt was worked on."""
        self._has_output = True
        self._user.spend(num_tokens)

    def __enter__(self) -> None:
        self._user.spend(self._num_prompt_tokens)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        has_failed = isinstance(error, Exception)  # being cancelled is none
        if has_failed and not self._has_output:
            self._user.spend(-self._num_prompt_tokens)


class ApiKeys:
    """Without any entry everybody is let in, as a user without name or limits."""

    def __init__(self, entries: Sequence[KeyEntry] = (), *, clock: Callable[[], float]) -> None:
        self._users = [(entry.sha256.encode(), User(entry, clock=clock)) for entry in entries]
        self._anybody = None if entries else User(KeyEntry(name="", sha256=""), clock=clock)
        self.weights = MappingProxyType({entry.name: entry.weight for entry in entries})

    def user(self, authorization: str) -> User:
        """Whose `authorization` header this is. Raises BadApiKey.

        Compares digests with every entry, so the time it takes tells nothing about the keys.
        """
        if self._anybody is not None:
            return self._anybody
        kind, _, key = authorization.partition(" ")
        shown = digest(key.strip()).encode()
        found = None
        for known, user in self._users:
            if hmac.compare_digest(shown, known):
                found = user
        if found is None or kind.lower() != "bearer":
            raise BadApiKey(_REFUSAL)
        return found


def digest(key: str) -> str:
    """What a key is stored as. Keys are long and random, so a plain hash cannot be guessed backwards."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def read_entries(path: Path, *, single_key: str = "") -> tuple[KeyEntry, ...]:
    """The entries of a TOML file with a list `keys`, and one more for a key given by itself.

    Raises ValueError naming the file's faulty entry, never a key.
    """
    entries = (*_of_file(path), *single_entry(single_key))
    for index, entry in enumerate(entries):
        before = entries[:index]
        where = f"keys[{index}]" if index < len(entries) - bool(single_key) else "api_key"
        if entry.name in [one.name for one in before]:
            raise ValueError(f"api_keys_file: {where}.name is used twice: {entry.name!r}")
        if entry.sha256 in [one.sha256 for one in before]:
            raise ValueError(f"api_keys_file: {where} is a key that is there already")
    return entries


def single_entry(key: str) -> tuple[KeyEntry, ...]:
    return (KeyEntry(name="default", sha256=digest(key)),) if key else ()


def _of_file(path: Path) -> tuple[KeyEntry, ...]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"api_keys_file must be readable, got {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ValueError(f"api_keys_file must be TOML, got {str(path)!r}") from None
    found = table.get("keys")
    if not isinstance(found, list) or not found or table.keys() != {"keys"}:
        raise ValueError("api_keys_file must hold a list of [[keys]] and nothing else")
    return tuple(_entry(f"keys[{index}]", values) for index, values in enumerate(found))


def _entry(where: str, values: Any) -> KeyEntry:
    if not isinstance(values, dict):
        raise ValueError(f"api_keys_file: {where} must be a table")
    for name, value in values.items():
        if name not in _FIELDS:
            raise ValueError(f"api_keys_file: {where} must have only {', '.join(_FIELDS)}, got {name!r}")
        if type(value) not in _FIELDS[name]:
            kinds = " or ".join(kind.__name__ for kind in _FIELDS[name])
            raise ValueError(f"api_keys_file: {where}.{name} must be {kinds}")
    if not values.get("name"):
        raise ValueError(f"api_keys_file: {where}.name must be set")
    sha256 = values.get("sha256", "").lower()
    if len(sha256) != 64 or any(char not in "0123456789abcdef" for char in sha256):
        raise ValueError(f"api_keys_file: {where}.sha256 must be 64 hexadecimal digits (see `paceline key`)")
    for name in ("requests_per_minute", "tokens_per_minute"):
        if values.get(name, 0) < 0:
            raise ValueError(f"api_keys_file: {where}.{name} must be at least 0, got {values[name]}")
    if not 0 < values.get("weight", 1) < float("inf"):
        raise ValueError(f"api_keys_file: {where}.weight must be positive, got {values['weight']}")
    return KeyEntry(**{**values, "sha256": sha256})
