"""API keys: what a key file may be, who gets in, and that nothing shows a key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from http_rig import MODEL, running, says
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.api_server.api_keys import ApiKeys, Tenant, load_api_keys
from octavo.protocol.lifecycle import ExitCode, StartupError

ALICE, BOB = "sk-alice-7f3a", "sk-bob-99c1"
TWO_KEYS = f"""
[[key]]
name = "alice"
key = "{ALICE}"
weight = 3

[[key]]
name = "bob"
key_sha256 = "{hashlib.sha256(BOB.encode()).hexdigest().upper()}"
"""
BODY = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
JSON_HEADERS = {"Content-Type": "application/json"}


def key_file(directory: Path, text: str = TWO_KEYS, mode: int = 0o600) -> str:
    path = directory / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def load(directory: Path, text: str = TWO_KEYS, mode: int = 0o600) -> ApiKeys:
    return load_api_keys(key_file(directory, text, mode))


def test_each_key_is_a_tenant(tmp_path: Path) -> None:
    keys = load(tmp_path)
    assert keys.find([f"Bearer {ALICE}"]) == Tenant("alice", 3)
    assert keys.find([f"bearer  {BOB} "]) == Tenant("bob", 1)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [ALICE],
        [f"Basic {ALICE}"],
        [f"Bearer {ALICE[:-1]}"],
        [f"Bearer {ALICE}x"],
        [f"Bearer {ALICE.upper()}"],
        [f"Bearer {ALICE} {BOB}"],
        [f"Bearer {ALICE}", f"Bearer {BOB}"],
        [f"Bearer {hashlib.sha256(BOB.encode()).hexdigest()}"],
        ["Bearer \udcff"],
    ],
)
def test_anything_else_is_nobody(tmp_path: Path, headers: list[str]) -> None:
    assert load(tmp_path).find(headers) is None


def test_a_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    keys = load(tmp_path)
    assert keys.find([], [ALICE]) == keys.find([], [f" {ALICE} "]) == Tenant("alice", 3)
    assert keys.find([f"Bearer {ALICE}"], [ALICE]) == Tenant("alice", 3), "gateways send both"


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        ([], [""]),
        ([], [f"Bearer {ALICE}"]),
        ([], [ALICE, ALICE]),
        ([f"Bearer {BOB}"], [ALICE]),
        ([f"Bearer {ALICE}"], [""]),
        ([f"Basic {ALICE}"], [ALICE]),
        (["Bearer "], [ALICE]),
    ],
)
def test_two_headers_that_do_not_agree_are_nobody(
    tmp_path: Path, authorization: list[str], x_api_key: list[str]
) -> None:
    assert load(tmp_path).find(authorization, x_api_key) is None


def test_no_key_is_nobody_even_when_its_digest_is_in_the_file(tmp_path: Path) -> None:
    keys = load(tmp_path, f'[[key]]\nname = "a"\nkey_sha256 = "{hashlib.sha256(b"").hexdigest()}"\n')
    for authorization, x_api_key in (([], []), (["Bearer "], []), ([], [""])):
        assert keys.find(authorization, x_api_key) is None


def test_every_key_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load(tmp_path)
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("hmac.compare_digest", compare)
    for headers in ([f"Bearer {ALICE}"], [f"Bearer {BOB}"], ["Bearer nobody"], []):
        compared.clear()
        keys.find(headers)
        assert len(compared) == 2


ENTRY = '[[key]]\nname = "a"\nkey = "sk-secret"\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "[[key]] tables"),
        ("key = []", "[[key]] tables"),
        ("key = 5", "[[key]] tables"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"', "[[key]] tables"),
        ('[[key]]\nkey = "sk-secret"', "[[key]] tables"),
        ('[[key]]\nname = ""\nkey = "sk-secret"', "key[0].name"),
        ('[[key]]\nname = "a b"\nkey = "sk-secret"', "key[0].name"),
        ('[[key]]\nname = "a"', "exactly one of key and key_sha256"),
        (ENTRY + f'key_sha256 = "{"0" * 64}"', "exactly one of key and key_sha256"),
        ('[[key]]\nname = "a"\nkey = ""', "key[0].key"),
        ('[[key]]\nname = "a"\nkey = "sk secret"', "key[0].key"),
        ('[[key]]\nname = "a"\nkey = "sk-secret\\n"', "key[0].key"),
        ('[[key]]\nname = "a"\nkey_sha256 = "sk-secret"', "key[0].key_sha256"),
        (ENTRY + "weight = 0", "key[0].weight"),
        (ENTRY + "weight = true", "key[0].weight"),
        (ENTRY + "weight = 1.5", "key[0].weight"),
        (ENTRY + "sk-secret = 1", "nothing else"),
        (ENTRY + "name sk-secret", "line 4"),
        (ENTRY + 'key = "sk-secret"', "not TOML"),
        (ENTRY + '[[key]]\nname = "b"\nkey = "sk-secret"', "same key as a"),
        (ENTRY + '[[key]]\nname = "a"\nkey = "other"', "twice"),
    ],
)
def test_a_wrong_file_is_refused_with_a_line_that_shows_no_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(StartupError) as refused:
        load(tmp_path, text)
    assert refused.value.exit_code == ExitCode.USAGE
    assert named in refused.value.message
    assert "sk-secret" not in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o666])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(StartupError, match="chmod o-rwx"):
        load(tmp_path, mode=mode)
    load(tmp_path, mode=0o640)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(StartupError, match=re.escape(str(path))):
            load_api_keys(str(path))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    binary.chmod(0o600)
    with pytest.raises(StartupError, match="UTF-8"):
        load_api_keys(str(binary))


names = st.text("ab1:", min_size=1, max_size=4)
salts = st.text("ab1:", max_size=4)


@given(names, salts, names, salts)
@example("a", "b:c", "a:b", "c")
@example("a", "1:b:", "1:a:1", "")
def test_no_two_pairs_of_tenant_and_salt_are_the_same_salt(name: str, salt: str, other: str, other_salt: str) -> None:
    is_same = Tenant(name).cache_salt(salt) == Tenant(other).cache_salt(other_salt)
    assert is_same == ((name, salt) == (other, other_salt))


async def test_the_key_decides_tenant_weight_and_salt(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path)) as rig:
        for key, salt in ((ALICE, None), (BOB, None), (ALICE, "s"), (BOB, "s"), (ALICE, "s")):
            headers = {**JSON_HEADERS, "Authorization": f"Bearer {key}"}
            status, _ = await rig.post("/v1/completions", {**json.loads(BODY), "cache_salt": salt}, headers=headers)
            assert status == 200
    found = [(each.tenant, each.tenant_weight) for each in rig.engine.added]
    assert found == [("alice", 3), ("bob", 1)] * 2 + [("alice", 3)]
    sent = [each.cache_salt for each in rig.engine.added]
    assert sent[2] == sent[4]
    assert len(set(sent)) == 4


async def test_without_keys_everybody_is_the_same_tenant(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        await rig.complete(max_tokens=1)
        await rig.complete(max_tokens=1, cache_salt="s")
    assert [(each.tenant, each.cache_salt) for each in rig.engine.added] == [("", ""), ("", "s")]


def assert_is_refusal(path: str, answer: Any) -> None:
    """Each API has its own shape of errors."""
    if path.startswith("/api/"):
        assert answer["code"] == "invalid_api_key"
        return
    expected = "authentication_error" if path.startswith("/v1/messages") else "invalid_request_error"
    assert (answer["error"]["code"], answer["error"]["type"]) == ("invalid_api_key", expected)


async def test_every_route_but_the_probes_and_metrics_needs_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path)) as rig:
        routes = {
            (route.method, route.resource.canonical.replace("{model}", MODEL))
            for route in rig.server.app.router.routes()
            if route.resource is not None
        }
        closed = 0
        for method, path in sorted({*routes, ("GET", "/nope"), ("POST", "/health")}):
            for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
                async with rig.session.request(method, path, headers=headers) as response:
                    is_open = method in ("GET", "HEAD") and path in ("/health", "/ready", "/metrics")
                    assert (response.status == 200) is is_open, (method, path)
                    if is_open:
                        continue
                    closed += 1
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert_is_refusal(path, await response.json())
        assert closed > 10
        assert rig.engine.added == []
        async with rig.session.get("/v1/models", headers={"Authorization": f"Bearer {ALICE}"}) as response:
            assert response.status == 200


async def raw_answer(port: int, request: str) -> bytes:
    """Send `request`, whatever it is, and return what comes back first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    async with asyncio.timeout(10):
        answer = await reader.read(4096)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "target", ["/health?x=1", "//health", "/health/", "/%68ealth", "/v1/models?/health", "/health/../v1/models", "*"]
)
async def test_only_the_exact_paths_are_open(tmp_path: Path, target: str) -> None:
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path)) as rig:
        answer = await raw_answer(rig.port, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.split()[1] in (b"401", b"400"), answer


async def test_the_refusal_comes_before_the_body(tmp_path: Path) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n"
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path)) as rig:
        assert (await raw_answer(rig.port, head)).split()[1] == b"401"


async def test_with_keys_any_host_name_is_served(tmp_path: Path) -> None:
    headers = {**JSON_HEADERS, "Authorization": f"Bearer {BOB}", "Host": "models.example"}
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path)) as rig:
        assert (await rig.post("/v1/completions", BODY, headers=headers))[0] == 200
        async with rig.session.get("/health", headers={"Host": "models.example"}) as response:
            assert response.status == 200


async def test_no_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(tmp_path, says("x"), api_key_file=key_file(tmp_path), log_requests=True) as rig:
        for key in (ALICE, "sk-wrong-one"):
            headers = {**JSON_HEADERS, "Authorization": f"Bearer {key}"}
            await rig.post("/v1/completions", BODY, headers=headers)
    assert "POST /v1/completions 401" in caplog.text
    assert not any(secret in caplog.text for secret in (ALICE, "sk-wrong-one", "Bearer"))
