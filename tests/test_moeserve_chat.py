"""Chat templates in their sandbox, content parts, and the reasoning split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.chat import CallForm, ChatTemplate, content_text, load_chat_template
from moeserve.errors import ConfigError, InvalidRequest
from moeserve.reasoning import ReasoningSplitter, prompt_opens_reasoning
from moeserve.server.rehearsal import CHAT_TEMPLATE, write_tokenizer
from moeserve.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"})


def test_renders_with_special_tokens_and_flags() -> None:
    chat = template(CHAT_TEMPLATE)
    assert chat.render(USER) == "<s><|user|>hi<|assistant|></think>"
    assert chat.render(USER, variables={"thinking": True}).endswith("<think>")
    assert chat.render(USER, add_generation_prompt=False) == "<s><|user|>hi"


def test_blocks_are_trimmed_as_checkpoints_expect() -> None:
    assert template("{% if true %}\n  x\n  {% endif %}\ny").render(USER) == "  x\ny"


def test_tojson_does_not_escape_for_html_and_keeps_unicode() -> None:
    tools = [{"type": "function", "function": {"name": "f<é>'&"}}]
    assert template("{{ tools | tojson }}").render(USER, tools=tools) == json.dumps(
        tools, ensure_ascii=False
    )


def test_other_things_templates_use() -> None:
    assert len(template("{{ strftime_now('%Y') }}").render(USER)) == 4
    assert template("{% for m in messages %}{% break %}{% endfor %}z").render(USER) == "z"
    assert template("a{% generation %}b{% endgeneration %}c").render(USER) == "abc"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",  # immutable sandbox
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 + 'a' }}",
        "{{ missing.attribute }}",
    ],
)
def test_what_a_template_raises_is_a_refused_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template") as caught:
        template(source).render(USER)
    assert caught.value.field == "messages"
    if "alternate" in source:
        assert "roles must alternate" in str(caught.value)


def test_sandbox_shows_no_classes() -> None:
    assert template("{{ ''.__class__ }}x").uses_tools is False
    with pytest.raises(InvalidRequest):
        template("{{ cycler.__init__.__globals__.os }}").render(USER)


def test_content_parts_are_joined_and_other_kinds_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert content_text(parts, "x") == "a\nb"
    assert content_text(None, "x") is None
    with pytest.raises(InvalidRequest, match="image_url"):
        content_text([{"type": "image_url", "image_url": {"url": "u"}}], "messages.0.content")
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content=5"):
        content_text(5, "messages.0.content")
    assert (
        template("{{ messages[0]['content'] }}").render([{"role": "user", "content": parts}])
        == "a\nb"
    )


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(message) == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert template(knows).render(message) == "yes"


def test_tools_need_a_template_that_renders_them() -> None:
    with pytest.raises(InvalidRequest, match="knows no tools"):
        template("{{ messages }}").render(USER, tools=[{"type": "function"}])


def test_where_templates_come_from(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    assert load_chat_template(tmp_path, Tokenizer(tmp_path)) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{tools}}"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(tmp_path, Tokenizer(tmp_path))
    assert found is not None and found.render(USER) == "D"
    assert found.render(USER, tools=[{"a": 1}]).startswith("T")
    (tmp_path / "chat_template.jinja").write_text("file")
    found = load_chat_template(tmp_path, Tokenizer(tmp_path))
    assert found is not None and found.render(USER) == "file"
    given = tmp_path / "mine.jinja"
    given.write_text("mine")
    found = load_chat_template(tmp_path, Tokenizer(tmp_path), given)
    assert found is not None and found.render(USER) == "mine"
    given.write_text("{% if %}")
    with pytest.raises(ConfigError, match="jinja2"):
        load_chat_template(tmp_path, Tokenizer(tmp_path), given)
    with pytest.raises(ConfigError, match="nowhere"):
        load_chat_template(tmp_path, Tokenizer(tmp_path), tmp_path / "nowhere")


# ---- tools and their calls -----------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHOWS = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endif %}{% endfor %}"
# How templates of served families read past calls: as text, as objects, either; beside a content
# that must be null, or that is shown too.
AS_TEXT = SHOWS + "{{ c['function']['name'] + c['function']['arguments'] }}" + END
AS_OBJECT = SHOWS + "{{ c.function.name }}{{ c.function.arguments | tojson }}" + END
BY_ITEMS = SHOWS + (
    "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
    "{% endfor %}" + END
)
IF_NULL = AS_TEXT.replace("{% if m.tool_calls %}", "{% if m.content is none %}")
IF_TEXT = AS_TEXT.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}{{ m.content + '' }}")


def history(content: object, arguments: object = '{"a": 1}') -> list[dict[str, object]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [*USER, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("source", "shown", "as_object", "empty", "beside"),
    [
        (AS_TEXT, 'f{"a": 1}', False, None, False),
        (AS_OBJECT, 'f{"a": 1}', True, None, False),
        (BY_ITEMS, "fa=1", True, None, False),
        (IF_NULL, 'f{"a": 1}', False, None, False),
        (IF_TEXT, 'f{"a": 1}', False, "", True),
    ],
)
@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_past_calls_are_given_as_the_template_reads_them(
    source: str,
    shown: str,
    as_object: bool,
    empty: str | None,
    beside: bool,
    content: object,
    arguments: object,
) -> None:
    chat = template(source)
    assert chat.call_form == CallForm(as_object, empty, beside)
    assert chat.render(history(content, arguments)) == shown


def test_what_a_template_cannot_show_of_past_calls_is_refused_not_lost() -> None:
    with pytest.raises(InvalidRequest, match="does not show tool calls") as caught:
        template("{% for m in messages %}{{ m.content }}{% endfor %}").render(history(None))
    assert caught.value.field == "messages.1.tool_calls"
    with pytest.raises(InvalidRequest, match="text beside tool calls"):
        template(AS_TEXT).render(history("words"))
    assert template(IF_TEXT).render(history("words")) == 'wordsf{"a": 1}'
    for arguments in ("{", "[1]", "5"):
        with pytest.raises(InvalidRequest, match="text of a JSON object") as caught:
            template(AS_OBJECT).render(history(None, arguments))
        assert caught.value.field == "messages.1.tool_calls.0.function.arguments"
        assert arguments in template(AS_TEXT).render(history(None, arguments))


def test_fields_that_are_null_are_not_there() -> None:
    source = "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}"
    nulls: dict[str, object] = dict.fromkeys(("tool_calls", "refusal", "audio", "name"))
    messages = [{"role": "assistant", "content": None} | nulls, {"role": "user", "content": "x"}]
    assert template(source).render(messages) == "role,content;role,content;"
    assert template("{{ messages[0].content + '!' }}").render(messages) == "!"
    messages[0]["tool_calls"] = []
    assert template(source).render(messages) == "role,content;role,content;"


def test_tools_are_filled_only_for_templates_that_need_it() -> None:
    bare = [{"type": "function", "function": {"name": "f", "description": None}}]
    whole = template("{{ tools | tojson }}").render(USER, tools=bare)
    assert json.loads(whole) == [{"type": "function", "function": {"name": "f"}}]
    needs = "{{ 'D:' + tools[0].function.description }}{{ tools[0].function.parameters | tojson }}"
    assert template(needs).render(USER, tools=bare) == 'D:{"type": "object", "properties": {}}'
    with pytest.raises(InvalidRequest, match="cannot render these messages and tools"):
        template("{{ tools[0].function.other | tojson }}").render(USER, tools=bare)


def test_a_refusal_part_has_its_own_text() -> None:
    assert content_text([{"type": "refusal", "refusal": "no"}], "x") == "no"


def test_a_template_knows_tools_when_it_reads_them() -> None:
    assert not template("{% for m in messages %}{{ m.tools }} tools{% endfor %}").uses_tools
    assert template("{% if tools is defined %}{{ tools }}{% endif %}").uses_tools


# ---- reasoning ----------------------------------------------------------------------------------


def split(text: str, *, opened: bool, cuts: list[int]) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    bounds = [0, *sorted(x % (len(text) + 1) for x in cuts), len(text)]
    got = [splitter.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    got.append(splitter.flush())
    return "".join(x[0] for x in got), "".join(x[1] for x in got)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("because</think>yes", True, "because", "yes"),
        ("<think>because</think>yes", False, "because", "yes"),
        ("\n<think>because</think>yes", False, "because", "yes"),
        ("plain answer", False, "", "plain answer"),
        ("a <think> b </think>", False, "", "a <think> b </think>"),
        ("a <th", False, "", "a <th"),
        ("<th", False, "", "<th"),
        ("never closed </thin", True, "never closed </thin", ""),
        ("x</think>a</think>b", True, "x", "a</think>b"),
        ("</think>", True, "", ""),
        ("", True, "", ""),
        ("   ", False, "", "   "),
        ("a < b and </ c</think>ok", True, "a < b and </ c", "ok"),
    ],
)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=8))
def test_reasoning_split_whatever_the_pieces(
    text: str, opened: bool, reasoning: str, content: str, cuts: list[int]
) -> None:
    assert split(text, opened=opened, cuts=cuts) == (reasoning, content)


def test_prompt_that_opens_reasoning() -> None:
    assert prompt_opens_reasoning("<|assistant|><think>\n")
    assert not prompt_opens_reasoning("<|assistant|></think>")
    assert not prompt_opens_reasoning("what does <think> mean?<|assistant|>")
