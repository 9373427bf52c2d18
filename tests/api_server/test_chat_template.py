"""Chat templates: rendered as transformers renders them, and contained whatever they do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from octavo.api_server.chat_template import ChatTemplate, ChatTemplateError
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.lifecycle import ExitCode, StartupError

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "<b>Größe & 'quotes'</b>"}],
    "turns": [
        {"role": "user", "content": "1+1?\n"},
        {"role": "assistant", "content": "2 😀"},
        {"role": "user", "content": "{{ 7 * 7 }} {% if %}"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"city": "Köln", "n": [1, 2.5, None]}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"t": 3}'},
        {"role": "user", "content": "thanks"},
    ],
}

TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "system_first_and_alternation": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'].strip() %}
{%- else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{%- for message in rest %}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}
    {%- if loop.index0 == 0 and system %}{{ '<<SYS>>' ~ system ~ '<</SYS>>' }}{% endif %}
    {{- '[INST] ' ~ message.content ~ ' [/INST]' if message.role == 'user' else ' ' ~ message.content ~ eos_token }}
{%- endfor %}""",
    "namespace": """
{%- set ns = namespace(index=0, last='') %}
{%- for message in messages[::-1] if message.role == 'user' %}
  {% set ns.index = ns.index + 1 %}{% set ns.last = ns.last ~ message.content[:3] %}
{%- endfor %}
{{ ns.index }}: {{ ns.last }} {{ dict(a=1)['a'] }} {{ namespace({'b': 2}, c=3).b }}
""",
    "json": """
{%- if tools is defined and tools is none %}no tools{% endif %}
{%- for message in messages %}
    {{ message | tojson }}
    {%- for call in message.tool_calls or [] %}
        {{ call.function.arguments | tojson(indent=4) }}
        {{ call.function | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
    {%- endfor %}
{%- endfor %}""",
    "loop_controls": """
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{ loop.index }}/{{ loop.length }} {{ loop.previtem.role if not loop.first }} {{ message.role | upper }}
{%- else %}nothing{% endfor %}""",
    "generation": """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {%- set x = 1 %}{{ message.content }}
        {% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}""",
    "macros": """
{%- macro block(role, text='') -%}<{{ role }}>{{ caller() if caller else text }}</{{ role }}>{%- endmacro %}
{%- for role, group in messages | groupby('role') %}{{ block(role, group | map(attribute='content') | join('+')) }}
{%- endfor %}
{%- call block('x') %}inner{{ messages | length }}{% endcall %}
{%- for message in messages | selectattr('role', 'equalto', 'user') | list %}{{ message.content.split('?')[0] }}
{%- endfor %}""",
    "undefined_is_empty": "{{ missing }}{{ messages[0].missing }}{% if not missing %}empty{% endif %}{{ bos_token }}",
    "whitespace": "  {% if true %}\n  kept\n  {% endif %}\nlast {# comment #}\n",
}


def apply_chat_template(source: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Return what transformers renders."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.word_piece(), **SPECIAL_TOKENS)
    rendered: str = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return rendered


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(template: str, chat: str, add_generation_prompt: bool) -> None:
    source, messages = TEMPLATES[template], CHATS[chat]
    rendered = ChatTemplate(source, SPECIAL_TOKENS).render(messages, add_generation_prompt)
    assert rendered == apply_chat_template(source, messages, add_generation_prompt)
    assert rendered


def test_the_clock_is_the_same() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}"
    assert ChatTemplate(source, {}).render(CHATS["one"]) == apply_chat_template(source, CHATS["one"], True)


@pytest.mark.model
@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_renders_as_transformers_does(smollm2_directory: Path, chat: str) -> None:
    from transformers import AutoTokenizer

    template = Tokenizer.load(str(smollm2_directory)).chat_template
    reference = AutoTokenizer.from_pretrained(smollm2_directory)
    assert template is not None
    expected = reference.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=True)
    assert template.render(CHATS[chat]) == expected


@pytest.mark.parametrize("source", [TEMPLATES["chatml"], "{{ messages[1].content }}|", "{{ messages[2] | tojson }}"])
def test_b33_null_content_is_empty_content(source: str) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    message = {"role": "assistant", "tool_calls": [{"id": "c1"}]}
    chats = [
        [*CHATS["one"], {**message, **content}, {"role": "tool", "content": "42", "name": None}]
        for content in ({"content": ""}, {"content": None}, {})
    ]
    rendered = [template.render(chat) for chat in chats]
    assert rendered[0] == rendered[1] == rendered[2]
    assert "None" not in rendered[0]
    assert "null" not in rendered[0]


def test_a_refusal_of_the_template_is_told_to_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        template.render(CHATS["one"])


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="name"):
        ChatTemplate("{{ 'I am ' + messages[0].name }}", {}).render(CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0] | tojson(indent=messages) }}",
        "{{ missing | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% for x in 5 %}{% endfor %}",
    ],
)
def test_any_failure_of_a_template_is_the_same_short_error(source: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, {}).render(CHATS["one"])
    assert str(caught.value) == "the template fails on these messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{{ messages[0]['__class__'].__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace(__html__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{{ self.__init__.__globals__ }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__ }}",
        "{{ messages | attr('__class__') | attr('__mro__') }}",
        "{{ ('{0.__class__}' | attr('format'))(1) }}",
    ],
)
def test_a_private_attribute_is_undefined(source: str) -> None:
    assert ChatTemplate(source, {}).render(CHATS["one"]) == ""


ENDLESS = {
    "silent_loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop_over_messages": "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "printing_loop": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive_loop": "{% for m in [messages] recursive %}{% if loop.depth < 60 %}{{ loop([m, m]) }}{% endif %}"
    "{% endfor %}",
    "loop_in_block": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    "{% endset %}",
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_rendering_is_cut_while_the_event_loop_goes_on(kind: str) -> None:
    template = ChatTemplate(ENDLESS[kind], {}, timeout_s=0.1)
    rendering = asyncio.create_task(template.render_off_loop(CHATS["one"] * 3000))
    num_turns = 0
    while not rendering.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    with pytest.raises(ChatTemplateError, match="too long"):
        await rendering
    assert num_turns > 1


def test_too_much_output_is_cut() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", {}, max_output_chars=10_000)
    with pytest.raises(ChatTemplateError, match="too much output"):
        template.render(CHATS["one"])
    assert len(ChatTemplate("{{ 'x' * 10_000 }}", {}, max_output_chars=10_000).render([])) == 10_000


async def test_renderings_at_the_same_time_keep_to_their_own_messages() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], SPECIAL_TOKENS)
    chats = [[{"role": "user", "content": f"number {i}"}] * 50 for i in range(20)]
    rendered = await asyncio.gather(*(template.render_off_loop(chat) for chat in chats))
    assert rendered == [template.render(chat) for chat in chats]


def test_only_known_scalar_options_reach_a_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}", {})
    assert template.render([], enable_thinking=False) == "False"
    parameters = ({name: True} for name in ("self", "messages", "add_generation_prompt", "tools"))
    for bad in (*parameters, {"documents": []}, {"raise_exception": 1}, {"enable_thinking": []}):
        with pytest.raises(ChatTemplateError, match=next(iter(bad))):
            template.render([], **bad)  # type: ignore[arg-type]


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(StartupError, match="line 2") as caught:
        ChatTemplate("fine\n{% for %}", {})
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_MODEL


def test_tools_are_data_that_the_template_writes() -> None:
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}{% else %}{{ tools }}{% endif %}", {})
    assert template.render([], True, [{"name": "f"}]) == '[{"name": "f"}]'
    assert template.render([], True, []) == template.render([]) == "None"


@pytest.mark.parametrize(
    ("source", "knows_tools"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% macro list() %}{{ tools | length }}{% endmacro %}{{ list() }}", True),
        (TEMPLATES["chatml"], False),
        ("{{ messages[0].tools }} {{ 'tools' }} {% set tools = [] %}{{ tools }}", False),
    ],
)
def test_a_template_that_reads_tools_knows_them(source: str, knows_tools: bool) -> None:
    assert ChatTemplate(source, {}).knows_tools is knows_tools
