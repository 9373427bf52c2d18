"""Who may use the server: the file of API keys, and the check of the headers in which one request carries its key.

Invariants: keys themselves are forgotten once their SHA-256 digests are known, and neither is ever shown or logged. A
look-up compares with every key in constant time, so its duration says nothing about any of them. A key is a tenant:
its requests share KV blocks with no other key's, and it has its weight in the division of the tokens. Rejected: keys
on the command line or in the environment, where every user of the machine or every child process can read them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Annotated

import msgspec

from octavo.protocol.lifecycle import ExitCode, StartupError

MAX_FILE_BYTES = 2**20
MAX_WEIGHT = 10**6
BEARER = "bearer"
PLACE_IN_TOML = re.compile(r"\(at (line \d+, column \d+|end of document)\)")
WHERE = re.compile(r" - at `\$\.(.*)`$")
FIELDS = "name, key or key_sha256, perhaps weight, and nothing else"
RULES = {
    "name": "1 to 64 of A-Z a-z 0-9 . _ @ -",
    "key": "1 to 512 printable ASCII characters without spaces",
    "key_sha256": "64 hexadecimal digits",
    "weight": f"a whole number from 1 to {MAX_WEIGHT}",
}


class Tenant(msgspec.Struct, frozen=True):
    """Whose request it is; without API keys everybody is the tenant without a name."""

    name: str = ""
    weight: int = 1

    def cache_salt(self, salt: str) -> str:
        """Return the salt of this tenant's blocks for the client's own `salt`: no two pairs give the same."""
        return f"{len(self.name)}:{self.name}:{salt}" if self.name else salt


NOBODY = Tenant()
CALLER: ContextVar[Tenant] = ContextVar("caller", default=NOBODY)  # each request is handled in a task of its own


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[key]] of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._@-]{1,64}\Z")]
    key: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,512}\Z")] | None = None
    key_sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-fA-F]{64}\Z")] | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)] = 1


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    key: Annotated[tuple[KeyEntry, ...], msgspec.Meta(min_length=1)]


class ApiKeys:
    """The digests of all keys and the tenant of each."""

    def __init__(self, tenants: Sequence[tuple[bytes, Tenant]]) -> None:
        self._tenants = tuple(tenants)

    def find(self, authorization: Sequence[str], x_api_key: Sequence[str] = ()) -> Tenant | None:
        """Return the tenant whose key one request carries, by the values of its Authorization and X-Api-Key headers.

        Either will do; who sends both, as some gateways do, has to send the same key.
        """
        key = _only_key(authorization, x_api_key)
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known_digest, tenant in self._tenants:
            if hmac.compare_digest(known_digest, digest):
                found = tenant
        return found if key else None


def _only_key(authorization: Sequence[str], x_api_key: Sequence[str]) -> str:
    """Return the one key that the headers agree on; empty when there is none, or a header is there twice."""
    if len(authorization) > 1 or len(x_api_key) > 1:
        return ""
    keys = [value.strip() for value in x_api_key]
    for value in authorization:
        scheme, _, key = value.strip().partition(" ")
        keys.append(key.strip() if scheme.lower() == BEARER else "")
    return keys[0] if len(set(keys)) == 1 else ""


def load_api_keys(path: str) -> ApiKeys:
    """Read and check the file at `path`; raise StartupError whose line says what is wrong and shows no key."""
    text = _read(path)
    try:
        entries = msgspec.convert(tomllib.loads(text), type=KeyFile).key
    except tomllib.TOMLDecodeError as problem:  # its own text may quote the file
        place = PLACE_IN_TOML.search(str(problem))
        raise _refusal(f"{path} is not TOML" + (f" at {place[1]}" if place else "")) from None
    except msgspec.ValidationError as problem:
        raise _refusal(f"{path}: {_in_words(str(problem))}") from None
    tenants: dict[bytes, Tenant] = {}
    for number, entry in enumerate(entries, 1):
        digest = _digest_of(entry, f"{path}: key number {number}")
        if digest in tenants:
            raise _refusal(f"{path}: key number {number} ({entry.name}) is the same key as {tenants[digest].name}")
        if entry.name in {tenant.name for tenant in tenants.values()}:
            raise _refusal(f"{path}: the name {entry.name} is there twice; names must be unique")
        tenants[digest] = Tenant(entry.name, entry.weight)
    return ApiKeys([*tenants.items()])


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                raise _refusal(f"{path} must be a regular file of at most {MAX_FILE_BYTES} bytes")
            if status.st_mode & stat.S_IRWXO:
                raise _refusal(f"{path} is open to every user of this machine; say: chmod o-rwx {path}")
            return file.read(MAX_FILE_BYTES).decode()
    except OSError as problem:
        raise _refusal(f"cannot read {path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise _refusal(f"{path} is not UTF-8 at byte {problem.start}") from None


def _digest_of(entry: KeyEntry, what: str) -> bytes:
    if (entry.key is None) == (entry.key_sha256 is None):
        raise _refusal(f"{what} ({entry.name}) must have exactly one of key and key_sha256")
    return (
        hashlib.sha256(entry.key.encode()).digest() if entry.key is not None else bytes.fromhex(entry.key_sha256 or "")
    )


def _in_words(problem: str) -> str:
    """Say which field is wrong and what it must be; msgspec's own text may quote the file."""
    where = WHERE.search(problem)
    entry, _, field = where[1].rpartition(".") if where else ("", "", "")
    return (
        f"{entry}.{field} must be {RULES[field]}"
        if entry and field in RULES
        else f"must be [[key]] tables with {FIELDS}"
    )


def _refusal(message: str) -> StartupError:
    return StartupError(ExitCode.USAGE, message)
