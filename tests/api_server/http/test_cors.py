"""Web pages of other origins: closed by default, and open to those that are named and to nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_rig import MODEL, Rig, running, says

from octavo.api_server.options import build_parser, sections_of

CHAT, OTHER = "https://chat.example", "https://other.example"
KEYS = '[[key]]\nname = "a"\nkey = "sk-1"\n'


def key_file(directory: Path) -> str:
    path = directory / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


async def preflight(rig: Rig, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        **headers,
    }
    async with rig.session.options("/v1/chat/completions", headers=asked) as response:
        found = {name: value for name, value in response.headers.items() if name.startswith("Access-Control")}
        return response.status, found


async def test_nobody_is_named_by_default(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        assert await preflight(rig, CHAT) == (405, {})
        async with rig.session.get("/version", headers={"Origin": CHAT}) as response:
            assert response.status == 200
            assert not {"Access-Control-Allow-Origin", "Vary"} & response.headers.keys()


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_named_origin_may_ask_before_it_has_shown_a_key(tmp_path: Path, has_keys: bool) -> None:
    keys = {"api_key_file": key_file(tmp_path)} if has_keys else {}
    async with running(tmp_path, says("x"), cors_origins=(CHAT,), **keys) as rig:
        status, headers = await preflight(rig, CHAT)
        assert status == 204
        assert headers == {
            "Access-Control-Allow-Origin": CHAT,
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "authorization,content-type,x-stainless-os",
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
            "Access-Control-Max-Age": "600",
        }
        for stranger in (OTHER, "null", CHAT + ":444", CHAT.upper(), "http://chat.example"):
            assert await preflight(rig, stranger) == (401 if has_keys else 405, {})


async def test_what_is_not_a_preflight_needs_its_key(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), cors_origins=(CHAT,), api_key_file=key_file(tmp_path)) as rig:
        for method, headers in (
            ("OPTIONS", {"Origin": CHAT}),
            ("POST", {"Origin": CHAT, "Access-Control-Request-Method": "POST"}),
        ):
            async with rig.session.request(method, "/v1/completions", headers=headers) as response:
                assert response.status == 401
                assert response.headers["Access-Control-Allow-Origin"] == CHAT, "so that the page can read the error"


async def test_streams_and_errors_can_be_read_by_named_origins_only(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    async with running(tmp_path, says("xy"), cors_origins=(CHAT, "http://localhost:3000")) as rig:
        for fields, status in (({"stream": True}, 200), ({"n": 0}, 400), ({}, 200)):
            for origin, allowed in ((CHAT, CHAT), (OTHER, None), ("http://localhost:3000", "http://localhost:3000")):
                async with rig.session.post(
                    "/v1/completions", json=body | fields, headers={"Origin": origin}
                ) as answer:
                    assert answer.status == status
                    assert answer.headers.get("Access-Control-Allow-Origin") == allowed
                    assert answer.headers["Vary"] == "Origin"


async def test_a_star_is_everybody(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), cors_origins=("*",)) as rig:
        for origin in (CHAT, OTHER, "null"):
            status, headers = await preflight(rig, origin)
            assert (status, headers["Access-Control-Allow-Origin"]) == (204, origin)


async def test_header_names_that_are_none_are_not_sent_back(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), cors_origins=("*",)) as rig:
        for names in ("a: b", "<a>", "ä", "a" * 3000):
            status, headers = await preflight(rig, CHAT, **{"Access-Control-Request-Headers": names})
            assert status == 405
            assert "Access-Control-Allow-Headers" not in headers


def test_the_flag_takes_origins_with_commas_between_them() -> None:
    parse = build_parser().parse_args
    flag = f"--cors-origins={CHAT},http://localhost:3000"
    assert sections_of(parse(["serve", "m", flag]))["api"].cors_origins == (CHAT, "http://localhost:3000")
    assert sections_of(parse(["serve", "m", "--cors-origins", "*"]))["api"].cors_origins == ("*",)
    assert sections_of(parse(["serve", "m"]))["api"].cors_origins == ()


@pytest.mark.parametrize(
    "text", ["", "chat.example", "https://chat.example/", "https://a, https://b", "ftp://a", "https://"]
)
def test_the_flag_takes_nothing_that_browsers_never_say(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "m", f"--cors-origins={text}"])
    assert "argument --cors-origins: must be * or origins such as https://chat.example" in capsys.readouterr().err
