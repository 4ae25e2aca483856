"""The typed configuration, on a small job that has every kind of key."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import WeftError
from weft.train.config import as_dict, describe, load, option, section, tagged, to_toml


@dataclass(frozen=True, kw_only=True)
class Gpt:
    name: str = "gpt"
    layers: int = option(2, "blocks", least=1)
    size: str = option("tiny", "preset", allowed=("tiny", "small"))


@dataclass(frozen=True, kw_only=True)
class Resnet:
    name: str
    stem: int = option(0, "pixels", allowed=(0, 32, 224))


@dataclass(frozen=True, kw_only=True)
class Custom:
    name: str
    options: dict[str, Any] = option({}, "what the function takes")


MODELS: dict[str, type] = {"gpt": Gpt, "resnet18": Resnet, "resnet50": Resnet}


@dataclass(frozen=True, kw_only=True)
class Clip:
    norm: float = option(1.0, "largest norm; none where it is infinite", above=0, finite=False)


@dataclass(frozen=True, kw_only=True)
class Train:
    lr: float = option(1e-3, "learning rate", above=0, most=10)
    dropout: float = option(0.0, "share of zeros", least=0, below=1)
    updates: int = option(100, "how many updates", least=1)
    nested: bool = option(False, "whether it is")
    note: str = option("", "a remark")
    steps: list[int] = option([], "updates after which the rate falls", least=1)
    betas: list[float] = option([0.9, 0.999], "decay of the averages", least=0, below=1)
    words: list[str] = option(["loss"], "what to show", allowed=["loss", "lr", "bubble"])
    mixed: bool | str | list[Any] = option(False, "which of them", allowed=[False, True, "some"])
    free: dict[str, Any] = option({}, "anything")
    clip: Clip = option(Clip(), "how gradients are clipped")
    rank: int = option(
        0, "a key behind a section, and with a help that is as long as it can be in one line of a hundred"
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    train: Train = option(Train(), "how to train")
    method: str = option("wpipe", "schedule", allowed=["1f1b", "wpipe", "xpipe"])
    model: Any = tagged(MODELS, "gpt", "what to train", custom=Custom)


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(WeftError) as problem:
        section(Job, table)
    return str(problem.value)


def refused_load(file: Path | None, *sets: str) -> str:
    with pytest.raises(WeftError) as problem:
        load(Job, file, sets)
    return str(problem.value).replace(f"{file}", "job.toml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


# types


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("lr", 1, 1.0),
        ("lr", 1e-5, 1e-5),
        ("updates", 7, 7),
        ("nested", True, True),
        ("note", "a b", "a b"),
        ("steps", [1, 2], [1, 2]),
        ("steps", [], []),
        ("betas", [0, 0.5], [0.0, 0.5]),
        ("words", ["lr", "lr"], ["lr", "lr"]),
        ("mixed", False, False),
        ("mixed", "some", "some"),
        ("mixed", [True, "some"], [True, "some"]),
        ("free", {"a": {"b": [1, "c", {"d": True}]}}, {"a": {"b": [1, "c", {"d": True}]}}),
    ],
)
def test_a_value_of_the_right_type_is_accepted(key: str, value: Any, read: Any) -> None:
    got = getattr(section(Job, {"train": {key: value}}).train, key)
    assert got == read
    assert type(got) is type(read)
    assert not isinstance(got, list) or [type(item) for item in got] == [type(item) for item in read]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", "fast", 'train.lr must be a number above 0 and at most 10 (got "fast")'),
        ("lr", True, "train.lr must be a number above 0 and at most 10 (got true)"),
        ("lr", 0, "train.lr must be a number above 0 and at most 10 (got 0)"),
        ("lr", 10.5, "train.lr must be a number above 0 and at most 10 (got 10.5)"),
        ("lr", math.nan, "train.lr must be a number above 0 and at most 10 (got nan)"),
        ("lr", [1], "train.lr must be a number above 0 and at most 10 (got [1])"),
        ("dropout", 1, "train.dropout must be a number of at least 0 and below 1 (got 1)"),
        ("dropout", -0.1, "train.dropout must be a number of at least 0 and below 1 (got -0.1)"),
        ("updates", True, "train.updates must be a whole number of at least 1 (got true)"),
        ("updates", 1.0, "train.updates must be a whole number of at least 1 (got 1.0)"),
        ("updates", 0, "train.updates must be a whole number of at least 1 (got 0)"),
        ("rank", "1", 'train.rank must be a whole number (got "1")'),
        ("nested", 1, "train.nested must be true or false (got 1)"),
        ("note", 1, "train.note must be a string (got 1)"),
        ("note", None, "train.note must be a string (got None)"),
        ("steps", 1, "train.steps must be a list of whole numbers of at least 1 (got 1)"),
        ("steps", [1, 0], "train.steps[1] must be a whole number of at least 1 (got 0)"),
        ("steps", [True], "train.steps[0] must be a whole number of at least 1 (got true)"),
        ("betas", [math.inf], "train.betas[0] must be a number of at least 0 and below 1 (got inf)"),
        ("words", "loss", 'train.words must be a list of strings, each one of loss, lr, bubble (got "loss")'),
        ("words", [["loss"]], 'train.words[0] must be one of loss, lr, bubble (got ["loss"])'),
        ("words", ["los"], "train.words[0] must be one of loss, lr, bubble (got \"los\"), did you mean 'loss'?"),
        ("mixed", 1, "train.mixed must be one of false, true, some (got 1)"),
        ("mixed", "any", 'train.mixed must be one of false, true, some (got "any")'),
        ("mixed", [True, 0.5], "train.mixed[1] must be one of false, true, some (got 0.5)"),
        ("free", 3, "train.free must be a table (got 3)"),
        ("clip", 3, "train.clip is a section (got 3); give its keys, such as train.clip.norm"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(key: str, value: Any, message: str) -> None:
    assert refused({"train": {key: value}}).startswith(message)


def test_numbers_are_finite_unless_the_option_says_otherwise() -> None:
    assert section(Clip, {"norm": math.inf}).norm == math.inf
    for value in (math.nan, -math.inf, 10**400):
        with pytest.raises(WeftError, match=r"clip\.norm must be a number above 0 \(got"):
            section(Clip, {"norm": value}, "clip")

    @dataclass(frozen=True, kw_only=True)
    class Any_:
        strict: float = option(0.0, "")
        loose: float = option(0.0, "", finite=False)

    assert math.isnan(section(Any_, {"loose": math.nan}).loose)
    for value in (math.nan, math.inf, -math.inf, 10**400):
        with pytest.raises(WeftError, match=r"strict must be a number \(got"):
            section(Any_, {"strict": value})


def test_instances_do_not_share_defaults() -> None:
    Job().train.steps.append(3)
    Job().train.free["a"] = 1
    assert section(Job, {}) == Job()
    assert section(Job, {}).train.steps == []
    assert section(Job, {}).train.free == {}


def test_an_unsupported_type_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Bad:
        when: complex = 0j

    with pytest.raises(TypeError, match=r"Bad\.when .*complex"):
        section(Bad, {})


# names of keys and of values


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"method": "WPipe"}, "method must be one of 1f1b, wpipe, xpipe (got \"WPipe\"), did you mean 'wpipe'?"),
        ({"method": "zzz"}, 'method must be one of 1f1b, wpipe, xpipe (got "zzz")'),
        ({"method": 1}, "method must be one of 1f1b, wpipe, xpipe (got 1)"),
        (
            {"train": {"lrr": 1}},
            "train.lrr: unknown key, did you mean 'train.lr'?; keys of train: lr, dropout, updates, "
            "nested, note, steps, betas, words, mixed, free, clip, rank",
        ),
        (
            {"train": {"clip": {"Norms": 1}}},
            "train.clip.Norms: unknown key, did you mean 'train.clip.norm'?; keys of train.clip: norm",
        ),
        ({"trian": {"lr": 1}}, "trian: unknown key, did you mean 'train'?; there are train, method, model"),
        ({"lr": 1}, "lr: unknown key, did you mean 'train.lr'?; there are train, method, model"),
        ({"zzz": 1}, "zzz: unknown key; there are train, method, model"),
        (
            {"model": {"lyers": 1}},
            "model.lyers: unknown key, did you mean 'model.layers'?; keys of model gpt:",
        ),
        ({"model": {"name": "resnet18", "layers": 1}}, "model.layers: unknown key; keys of model resnet18:"),
        ({"model": {"size": "Small"}}, "model.size must be one of tiny, small (got \"Small\"), did you mean 'small'?"),
        ({"model": {"name": "resnet18", "stem": 33}}, "model.stem must be one of 0, 32, 224 (got 33)"),
        ({"model": "gpt"}, 'model is a section (got "gpt"); give its keys, such as model.name'),
        (
            {"model": {"name": "GPT2"}},
            "model.name must be one of gpt, resnet18, resnet50, or package.module:function, or file.py:function "
            "(got \"GPT2\"), did you mean 'gpt'?",
        ),
        ({"model": {"name": 3}}, "model.name must be one of gpt, resnet18, resnet50, or"),
    ],
)
def test_an_unknown_name_fails_with_its_path_and_a_suggestion(table: dict[str, Any], message: str) -> None:
    got = refused(table)
    assert got == message if not message.endswith((":", "or")) else got.startswith(message)


def test_a_section_alone_has_the_given_path() -> None:
    with pytest.raises(WeftError, match=r"^a\.b\.norm must be"):
        section(Clip, {"norm": "x"}, "a.b")


def test_suggestions_ignore_case() -> None:
    @dataclass(frozen=True)
    class Loud:
        kind: str = option("SGD", "", allowed=["SGD", "Adam"])

    with pytest.raises(WeftError, match="did you mean 'SGD'"):
        section(Loud, {"kind": "sgd"})


def test_a_long_value_is_cut() -> None:
    assert len(refused({"method": "x" * 1000})) < 200


# tagged sections


def test_the_name_of_a_tagged_section_chooses_its_keys() -> None:
    assert section(Job, {}).model == Gpt()
    assert section(Job, {"model": {"layers": 5}}).model == Gpt(layers=5)
    assert section(Job, {"model": {"name": "resnet50", "stem": 32}}).model == Resnet(name="resnet50", stem=32)


@pytest.mark.parametrize("name", ["pkg.mod:fn", "mod:fn", "mod:Class.make", "dir/file.py:fn", "C:\\dir\\file.py:fn"])
def test_a_user_function_takes_any_options(name: str) -> None:
    table = {"model": {"name": name, "options": {"width": 3, "deep": {"er": [1.5]}}}}
    assert section(Job, table).model == Custom(name=name, options={"width": 3, "deep": {"er": [1.5]}})
    assert "model.width: unknown key; keys of model" in refused({"model": {"name": name, "width": 3}})


@pytest.mark.parametrize("name", ["mod:", ":fn", "mod:1", "mod:a b", "mod:a.", ":"])
def test_an_incomplete_function_name_is_refused(name: str) -> None:
    assert "or package.module:function" in refused({"model": {"name": name}})


def test_functions_are_suggested_only_where_allowed() -> None:
    @dataclass(frozen=True)
    class Closed:
        data: Any = tagged({"resnet18": Resnet}, "resnet18", "")

    with pytest.raises(WeftError) as problem:
        section(Closed, {"data": {"name": "a:b"}})
    assert str(problem.value) == 'data.name must be one of resnet18 (got "a:b")'


# --set


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=1e-2", "lr", 0.01),
        (" train.lr = 1 ", "lr", 1.0),
        ("train.nested=true", "nested", True),
        ("train.steps=[1, 2]", "steps", [1, 2]),
        ('train.words=["lr"]', "words", ["lr"]),
        ("train.note=plain text", "note", "plain text"),
        ("train.note = a=b ", "note", "a=b"),
        ("train.note=", "note", ""),
        ("train.note=1", "note", "1"),
        ("train.note=true", "note", "true"),
        ("train.note=2024-01-01", "note", "2024-01-01"),
        ('train.note=" in quotes\\n"', "note", " in quotes\n"),
        ("train.note=1\nother = 2", "note", "1\nother = 2"),
        ("train.free={a = 1}", "free", {"a": 1}),
        ("train.free.a.b=1", "free", {"a": {"b": 1}}),
        ("train.free.a=some text", "free", {"a": "some text"}),
        ("train.free.a=1\nother = 2", "free", {"a": "1\nother = 2"}),
        ("train.free.a=[1, {b = false}]", "free", {"a": [1, {"b": False}]}),
        ("train.clip.norm=inf", "clip", Clip(norm=math.inf)),
    ],
)
def test_set_reads_toml_or_plain_text(text: str, key: str, value: Any) -> None:
    got = getattr(load(Job, None, [text]).train, key)
    assert got == value
    assert type(got) is type(value)  # plain, so that anything can be done with it


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.lr"], '--set takes key=value, such as model.options={} (got "train.lr")'),
        (["=3"], '--set takes key=value, such as model.options={} (got "=3")'),
        (["train=3"], '--set train is a section (got "3"); give its keys, such as train.lr'),
        (["model=gpt"], '--set model is a section (got "gpt"); give its keys, such as model.name'),
        (["train.lrr=1"], "--set train.lrr: unknown key, did you mean 'train.lr'?; keys of train: lr,"),
        (["trian.lr=1"], "--set trian: unknown key, did you mean 'train'?;"),
        (["train.lr=fast"], '--set train.lr must be a number above 0 and at most 10 (got "fast")'),
        (["train.lr.x=1"], "--set train.lr must be a number above 0 and at most 10 (got {x"),
        (["train.lr=1", "train.lr.x=1"], '--set train.lr.x: train.lr already has the value "1"'),
        (["train..lr=1"], "--set train.: unknown key;"),
        (["method=WPIPE"], '--set method must be one of 1f1b, wpipe, xpipe (got "WPIPE"), did you mean'),
        (["model.name=gtp"], "--set model.name must be one of gpt, resnet18, resnet50, or package.module:function"),
        (["model.name=resnet18", "model.layers=3"], "--set model.layers: unknown key; keys of model resnet18"),
        (["train.steps=[1, 0]"], "--set train.steps[1] must be a whole number of at least 1 (got 0)"),
        (["train.steps=1,2"], '--set train.steps must be a list of whole numbers of at least 1 (got "1,2")'),
        (["train.free=3"], "--set train.free must be a table (got 3)"),
        (["train.free={a = [1, 12:30:00]}"], "--set train.free.a[1] must be a string (in quotes), a number, true"),
        (
            ["train.free.when=2024-01-01"],
            "--set train.free.when must be a string (in quotes), a number, true, false, a",
        ),
    ],
)
def test_errors_of_set_name_it(sets: list[str], message: str) -> None:
    assert refused_load(None, *sets).startswith(message)


def test_set_overrides_the_file_and_the_last_one_wins(file: Path) -> None:
    file.write_text("[train]\nlr = 1\nupdates = 5\nfree = {a = 1, b = 2}\n")
    job = load(Job, file, ["train.lr=2", "train.free.b=4", "train.lr=3"])
    assert job.train == Train(lr=3.0, updates=5, free={"a": 1, "b": 4})
    assert load(Job, None, ["train.free.a=1", "train.free={b=2}"]).train.free == {"b": 2}
    assert load(Job, file) == load(Job, str(file), []) != job


def test_another_name_by_set_drops_the_keys_of_the_old_name(file: Path) -> None:
    file.write_text('[model]\nname = "gpt"\nlayers = 4\n')
    assert load(Job, file, ["model.name=gpt"]).model == Gpt(layers=4)
    assert load(Job, file, ["model.stem=32", "model.name=resnet18"]).model == Resnet(name="resnet18", stem=32)
    assert load(Job, file, ["model.name=resnet18", "model.name=gpt"]).model == Gpt(layers=4)
    own = load(Job, file, ["model.name=a.b:c", "model.options.width=3"]).model
    assert own == Custom(name="a.b:c", options={"width": 3})
    assert refused_load(file, "model.name=resnet18", "model.layers=3").startswith("--set model.layers: unknown")

    file.write_text("[model]\nlayers = 4\n")  # the default's name, unsaid
    assert load(Job, file, ["model.name=resnet18"]).model == Resnet(name="resnet18")
    assert load(Job, file, ["model.name=gpt"]).model == Gpt(layers=4)

    file.write_text('[model]\nname = "resnet18"\nstem = 32\n')  # both names have the same keys
    assert load(Job, file, ["model.name=resnet50"]).model == Resnet(name="resnet50", stem=32)

    file.write_text('[model]\nname = "a:b"\noptions = {width = 3, deep = {er = 1}}\n')  # each function has its own
    assert load(Job, file, ["model.options.deep.est=2"]).model.options == {"width": 3, "deep": {"er": 1, "est": 2}}
    assert load(Job, file, ["model.name=a:c", "model.options.deep.est=2"]).model.options == {"deep": {"est": 2}}


def test_set_does_not_excuse_a_mistake_in_the_file(file: Path) -> None:
    file.write_text('[model]\nname = "gpt"\nstem = 32\n')
    assert refused_load(file, "model.name=resnet18").startswith("job.toml: model.stem: unknown key; keys of")
    file.write_text('[train]\nlr = "fast"\n')
    assert refused_load(file, "train.lr=1").startswith("job.toml: train.lr must be a number")


def test_only_the_final_values_are_built(file: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Pair:
        ranks: int = option(2, "")
        batch: int = option(2, "")

        def __post_init__(self) -> None:
            if self.batch % self.ranks:
                raise WeftError("batch must be a multiple of ranks")

    file.write_text("ranks = 4\n")
    assert load(Pair, file, ["batch=8"]) == Pair(ranks=4, batch=8)
    with pytest.raises(WeftError, match="multiple"):
        load(Pair, file)


# files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlr = 'x'\n", 'job.toml: train.lr must be a number above 0 and at most 10 (got "x")'),
        ("[train]\nlr = 2024-01-01\n", "job.toml: train.lr must be a number above 0 and at most 10 (got 2024-01-01)"),
        ("[train]\nfree.a = [12:30:00]\n", "job.toml: train.free.a[0] must be a string (in quotes), a number"),
        ("[[train]]\nlr = 1\n", "job.toml: train is a section (got [{lr = 1}]); give its keys"),
        ("[train]\nlr 3\n", "job.toml is not TOML: Expected '=' after a key in a key/value pair (at line 2, column 4)"),
        ("[train]\nlr = 1\nlr = 2\n", "job.toml is not TOML: Cannot overwrite a value (at line 3, column 7)"),
        ("[train]\nsteps = [1,\n", "job.toml is not TOML: Invalid value (at line 2, the last)"),
        (f"[train]\nlr = {'1' * 5000}\n", "job.toml is not TOML: Exceeds the limit"),
        (f"[train]\nfree.a = {'[' * 5000}\n", "job.toml is not TOML: "),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert refused_load(file).startswith(message)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert refused_load(tmp_path / "none.toml") == "job.toml can't be read: No such file or directory"
    assert refused_load(tmp_path) == "job.toml can't be read: Is a directory"
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    assert refused_load(tmp_path / "latin.toml").startswith(
        "job.toml is not TOML: 'utf-8' codec can't decode byte 0xff"
    )


def test_set_below_a_value_of_the_file_is_refused(file: Path) -> None:
    file.write_text("[train.free]\na = 1\n")
    assert refused_load(file, "train.free.a.b=1") == "--set train.free.a.b: train.free.a already has the value 1"


# writing

LEAVES = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
FREE = st.dictionaries(
    st.text(), st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
)
TRAINS = st.builds(
    Train,
    lr=st.floats(0, 10, exclude_min=True),
    updates=st.integers(1),
    nested=st.booleans(),
    note=st.text(),
    steps=st.lists(st.integers(1)),
    betas=st.lists(st.floats(0, 1, exclude_max=True)),
    words=st.lists(st.sampled_from(["loss", "lr", "bubble"])),
    free=FREE,
    clip=st.builds(Clip, norm=st.floats(0, exclude_min=True, allow_nan=False)),
)
NAMED = st.builds(Gpt, layers=st.integers(1)) | st.builds(Resnet, name=st.sampled_from(["resnet18", "resnet50"]))
OWNED = st.builds(Custom, name=st.just('dir with "quotes"/é.py:fn'), options=FREE)


@settings(max_examples=60)
@given(st.builds(Job, train=TRAINS, method=st.sampled_from(["1f1b", "xpipe"]), model=NAMED | OWNED))
def test_a_written_job_reads_as_the_same_job(job: Job) -> None:
    assert section(Job, tomllib.loads(to_toml(job))) == job
    assert tomllib.loads(to_toml(job)) == as_dict(job)
    assert section(Job, as_dict(job)) == job


def test_a_written_file_reads_as_the_same_job(file: Path) -> None:
    job = Job(
        train=Train(note="\x7f\r\n\t\0\"'\\ \u2028 ☃ 😀", free={"": {"a.b": [], "é": {}}}), model=Custom(name="a:b")
    )
    file.write_text(to_toml(job), encoding="utf-8")
    assert load(Job, file) == job


def test_every_key_is_written_with_its_help() -> None:
    assert (
        to_toml(Job(model=Resnet(name="resnet18")))
        == """\
method = "wpipe"  # schedule; one of 1f1b, wpipe, xpipe

# how to train
[train]
lr = 0.001  # learning rate; above 0 and at most 10
dropout = 0.0  # share of zeros; at least 0 and below 1
updates = 100  # how many updates; at least 1
nested = false  # whether it is
note = ""  # a remark
steps = []  # updates after which the rate falls; at least 1
betas = [0.9, 0.999]  # decay of the averages; at least 0 and below 1
words = ["loss"]  # what to show; one of loss, lr, bubble
mixed = false  # which of them; one of false, true, some
free = {}  # anything
rank = 0  # a key behind a section, and with a help that is as long as it can be in one line of a hundred

# how gradients are clipped
[train.clip]
norm = 1.0  # largest norm; none where it is infinite; above 0

# what to train
[model]
name = "resnet18"  # one of gpt, resnet18, resnet50, or package.module:function, or file.py:function
stem = 0  # pixels; one of 0, 32, 224
"""
    )


def test_a_comment_that_does_not_fit_beside_its_key_is_above_it() -> None:
    lines = to_toml(Job(train=Train(note="x" * 110, rank=10**20))).splitlines()
    assert lines[lines.index("# a remark") + 1] == f'note = "{"x" * 110}"'
    assert max(len(line) for line in lines) <= 120


def test_a_value_that_toml_can_not_hold_is_refused() -> None:
    with pytest.raises(WeftError, match=r"^train\.free\.a must be a string .* \(got None\)$"):
        to_toml(Job(train=Train(free={"a": None})))


def test_describe_has_a_row_for_every_key_that_can_be_given() -> None:
    rows = describe(Job)
    assert rows[0] == ("train.lr", "number", "0.001", "learning rate", "above 0 and at most 10")
    found = {key: row for key, *row in rows}
    assert len(found) == len(rows)
    assert found["train.steps"][:2] == ["list of whole numbers", "[]"]
    assert found["train.nested"] == ["true or false", "false", "whether it is", ""]
    assert found["train.clip.norm"][1] == "1.0"
    assert found["model.name"][:3] == ["string", '"gpt"', "what to train"]
    assert found["model.name"][3].startswith("one of gpt, resnet18, resnet50, or package.module:function")
    assert found["model.stem"][2] == "resnet18, resnet50: pixels"
    assert found["model.options"] == ["table", "{}", "your own: what the function takes", ""]
    assert [key for key, *_ in describe(Gpt, "model")] == ["model.name", "model.layers", "model.size"]
