# SPDX-License-Identifier: Apache-2.0
"""Reports: as tables, scalars, files, pictures and a sentence, and files of another kind."""

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot
from notes import told
from pytest import CaptureFixture, MonkeyPatch
from rich.console import Console

from megagraph.cli import main
from megagraph.cli.reports import Lease, draw_timeline, read_leases, read_report, report_table
from megagraph.cli.run import saved
from megagraph.reasons import verdict
from megagraph.report import check_target, path_of_stage, report_text, scalars, write_report

KEYS = ("model", "calls", "replays", "eager", "capacities", "capture_seconds", "padding_share")
MODEL: dict[str, Any] = {
    **{"model": "GPTModel", "layers": 2, "calls": 12_000, "replays": 9_000, "failures": []},
    **{"eager": {"WARMING_UP": 2_400, "TOO_MANY_SEQUENCES": 600}, "capture_seconds": 1.256},
    **{"replayed_rows": 40_000, "padding_share": 0.125},
    "capacities": [{"tokens": 512, "num_seqs": count, "max_seqlen": 512} for count in (8, 32)],
}
IDLE = MODEL | {"model": "Idle", "calls": 0, "replays": 0, "eager": {}, "capacities": []}
IDLE |= {"capture_seconds": 0.0, "replayed_rows": 0, "padding_share": None}
LEASES = {"stage 0": [[0, True, 1.0, 4.0], [1, False, 2.0, None]]}


def shown(reports: Sequence[dict[str, Any]]) -> str:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(report_table(reports))
    return printed.get()


def cells(reports: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The cells of each row by its label; a line that continues a row has the label ''."""
    rows: dict[str, list[str]] = {}
    for line in shown(reports).splitlines():
        if line.startswith("│"):
            label, *values = (cell.strip() for cell in line.strip("│").split("│"))
            rows.setdefault(label, []).extend(values)
    return rows


def test_the_table_names_graphs_that_are_used_unverified() -> None:
    training = {"variant": "training, 64 tokens", "why": "no micro-batch"}
    sites = [{**training, "site": f"layer {layer}"} for layer in range(3)]
    sites.append({"variant": "evaluation", "why": "NESTING", "site": "layer 0"})
    rows = cells([MODEL | {"verification": {"unverified_sites": sites}}])
    assert rows["not verified"] == ["layer 0 and 2 more (training, 64 tokens): no micro-batch"]
    assert "layer 0 (evaluation): NESTING" in rows[""]
    assert "not verified" not in cells([MODEL])


def test_the_table_has_a_column_for_each_model_with_counts_and_shares_and_a_row_for_each_reason() -> None:
    other = MODEL | {"model": "Critic", "eager": {"WARMING_UP": 1_200, "SUSPENDED": 1_800}}
    assert re.search(r"GPTModel\W+Critic", shown([MODEL, other]))
    rows = cells([MODEL, other])
    assert rows["layer calls"] == ["12,000"] * 2
    assert rows["replayed"] == ["9,000 (75.0%)"] * 2
    assert rows["eager: WARMING_UP"] == ["2,400 (20.0%)", "1,200 (10.0%)"]
    assert rows["eager: TOO_MANY_SEQUENCES"] == ["600 (5.0%)", "0 (0.0%)"]
    assert rows["eager: SUSPENDED"] == ["0 (0.0%)", "1,800 (15.0%)"]
    assert rows["padding share of replays"] == ["12.5%"] * 2
    assert rows["capture"] == ["1.26 s"] * 2
    assert rows["capacities"] == ["512 tokens, 8 documents"] * 2
    assert rows[""] == ["512 tokens, 32 documents"] * 2
    joined = cells([MODEL | {"layers": 24, "sites": 3}, MODEL])
    assert (joined["layers"], joined["sites of them"]) == (["24", "2"], ["3", "-"])
    assert "sites of them" not in cells([MODEL | {"sites": 2}])


def test_a_model_that_was_never_called_has_counts_of_0_and_no_shares() -> None:
    rows = cells([IDLE])
    assert (rows["layer calls"], rows["replayed"]) == (["0"], ["0"])
    assert (rows["padding share of replays"], rows["capacities"]) == (["-"], ["-"])
    assert not [label for label in rows if label.startswith("eager")]
    assert set(scalars([IDLE]).values()) == {0.0}
    assert not [name for name in scalars([IDLE]) if "share" in name]
    assert scalars([{key: MODEL[key] for key in KEYS}])["megagraph/GPTModel/replayed_rows"] == 0.0
    assert cells([])["layer calls"] == []


@pytest.mark.parametrize("sentence", ["modified: [torch.FloatTensor]", "no file [/tmp/x]", "in [decoder]"])
def test_what_stays_eager_is_shown_as_it_is_only_where_there_is_any(sentence: str) -> None:
    """An error's words in brackets were gone; a path in brackets ended the run in a MarkupError."""
    assert "stays eager" not in shown([MODEL])
    assert shown([{key: MODEL[key] for key in KEYS}]) == shown([MODEL])
    assert cells([MODEL, MODEL | {"failures": [sentence]}])["stays eager"] == ["", sentence]
    assert sentence in shown([MODEL | {"model": sentence}])
    assert "…" not in shown([MODEL | {"failures": [f"{sentence}: {'_' * 200}"]}])  # words were cut off


def test_capacities_and_micro_batches_are_told_apart_by_the_ranks_that_share_them() -> None:
    """Bug: three sizes had three identical lines."""
    capacities = [{"tokens": 512, "num_seqs": 8, "cp_size": size} for size in (1, 2)]
    sizes = {"1": {"replayed": 1_030}, "2": {"WARMING_UP": 1, "replayed": 12}}
    shared = MODEL | {"capacities": capacities, "cp_sizes": sizes}
    text = shown([shared])
    assert "512 tokens, 8 documents, 1 ranks" in text and "512 tokens, 8 documents, 2 ranks" in text
    assert "1: 1,030 replayed" in text and "2: 1 WARMING_UP, 12 replayed" in text
    assert scalars([shared])["megagraph/GPTModel/cp_2/replayed"] == 12.0


def test_scalars_are_plain_numbers_by_model_and_name_since_an_earlier_report() -> None:
    """Bug: models shared their names, so that the last one's numbers stood for all; all were totals."""
    plain = {"calls": 12_000, "replays": 9_000, "capture_seconds": 1.256, "replayed_rows": 40_000}
    plain |= {"padding_rows": 5_000, "replay_share": 0.75, "padding_share": 0.125}
    plain |= {f"eager/{reason}": count for reason, count in MODEL["eager"].items()}
    first = scalars([MODEL])
    assert first == {f"megagraph/GPTModel/{name}": value for name, value in plain.items()}
    assert {type(value) for value in first.values()} == {float}
    later = MODEL | {"calls": 12_100, "replays": 9_090, "replayed_rows": 40_200}
    later |= {"padding_share": 5_150 / 40_200, "eager": MODEL["eager"] | {"NESTING": 10}}
    figures = zip(plain, [100.0, 90.0, 0.0, 200.0, 150.0, 0.9, 0.75, 0.0, 0.0], strict=True)
    values = {f"megagraph/GPTModel/{name}": it for name, it in (*figures, ("eager/NESTING", 10.0))}
    values |= {f"megagraph/GPTModel_stage_1_chunk_0_2/{name}": value for name, value in plain.items()}
    assert scalars([later, MODEL | {"model": "GPTModel (stage 1, chunk 0) #2"}], since=[MODEL]) == values


@pytest.mark.parametrize("reports", [[], [MODEL | {"of_a_later_version": 1}], [MODEL, IDLE]])
def test_what_was_written_is_read_as_the_umask_lets(tmp_path: Path, reports: list[dict[str, Any]]) -> None:
    """A report could be read by its owner alone, whatever the umask: mkstemp makes 0600."""
    path = tmp_path / "new" / "folder" / "report.json"
    with told(os.umask, 0o022, os.umask(0o022)):
        write_report(reports, path)
    assert read_report(path) == reports
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A report of one model."""
    write_report([MODEL], tmp_path / "report.json")
    return tmp_path / "report.json"


def test_readers_see_the_old_report_until_the_new_is_whole(path: Path, monkeypatch: MonkeyPatch) -> None:
    replace, drafts = os.replace, []

    def look(draft: str, target: Path) -> None:
        assert read_report(path) == [MODEL]
        assert read_report(Path(draft)) == [IDLE]
        drafts.append(Path(draft))
        replace(draft, target)

    monkeypatch.setattr(os, "replace", look)
    write_report([IDLE], path)
    assert read_report(path) == [IDLE]
    assert drafts[0].parent == path.parent and not drafts[0].exists()


def test_a_write_or_a_move_that_fails_leaves_the_old_one_and_no_draft(path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_report([MODEL | {"calls": object()}], path)
    assert read_report(path) == [MODEL]
    folder = path.with_name("folder.json")
    folder.mkdir()
    with pytest.raises(OSError, match=r"folder\.json"):
        write_report([MODEL], folder)
    assert sorted(path.parent.iterdir()) == [folder, path]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path: Path, there: bool) -> None:
    """A user's symbolic link became a file, and the file that it named kept the older report."""
    target, link = tmp_path / "results" / "report.json", tmp_path / "link.json"
    target.parent.mkdir()
    if there:
        target.write_text("an older report")
    link.symlink_to("results/report.json")
    check_target("report", link)
    write_report([MODEL], link)
    assert link.is_symlink() and not target.is_symlink() and read_report(target) == [MODEL]
    assert sorted(tmp_path.rglob("*")) == [link, target.parent, target]


def test_what_is_no_file_is_written_into(tmp_path: Path) -> None:
    """As root, `--json /dev/stdout` put a file in the place of the system's own entry."""
    fifo, link, read = tmp_path / "fifo", tmp_path / "link", []
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link):
        check_target("report", path)
        reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
        reader.start()
        write_report([MODEL], path)
        reader.join()
    assert read == [report_text([MODEL])] * 2
    assert stat.S_ISFIFO(fifo.lstat().st_mode) and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [fifo, link]


def test_links_that_name_one_another_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(ValueError, match=f"^report: expected a file that can be written, got {one}: "):
        check_target("report", one)
    with pytest.raises(OSError, match="one"):
        write_report([MODEL], one)
    assert one.is_symlink() and other.is_symlink()


def test_a_hyphen_is_standard_output_and_a_file_that_takes_it_is_not_replaced(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Also if the file is named: the lines before the report went with the file that was replaced."""
    out, before = tmp_path / "out", os.dup(1)
    with out.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        os.dup2(file.fileno(), 1)
        try:
            print("a line")
            for path in (Path("-"), out):
                check_target("report", path)
                write_report([], path)
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert out.read_text() == "a line\n" + 2 * report_text([])
    assert [*tmp_path.iterdir()] == [out] and path_of_stage(Path("-"), 1) == Path("-")


WRONG_VALUES: list[tuple[str, object]] = [
    *(("calls", "many"), ("eager", ["WARMING_UP"]), ("eager", {"WARMING_UP": None})),
    *(("capacities", [{"tokens": 4}]), ("padding_share", "1%")),
    # Bug: of these each ended in a traceback.
    *(("failures", [5]), ("cuda_graph_modules", 5), ("slots", "one"), ("most_needed", 5)),
    ("most_needed", {"tokens": 4, "num_seqs": 4, "max_seqlen": "4"}),
    *(("cp_sizes", {"1": 5}), ("verification", {"unverified_sites": [{}]})),
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Of bytes that are no UTF-8 the message named no file; a folder ended in an IsADirectoryError.
        *((it, "") for it in (b"\xff\xfe{}", Path.mkdir, bool)),
        ("", "expected JSON, Expecting value: line 1 column 1"),
        ('{"format": 3, "models": []}', "expected format 2 of a report, got 3"),
        *((it, "expected an object with a list 'models'") for it in ("[]", "{}", '{"models": {}}')),
        # Bug: it looked for so many files, for hours.
        ('{"models": [], "stages": 2000000}', "stages: expected a count of at most 10000, got 2000000"),
        ('{"models": [3]}', f"models[0]: expected the keys {', '.join(KEYS)}, no model"),
        (
            json.dumps({"models": [MODEL, {key: MODEL[key] for key in KEYS if key != "eager"}]}),
            f"models[1]: expected the keys {', '.join(KEYS)}, no eager",
        ),
        # `megagraph report` said "Cannot specify ',' with 's'", or ended in a KeyError.
        *(
            (json.dumps({"models": [MODEL | {key: value}]}), f"models[0].{key}: expected ")
            for key, value in WRONG_VALUES
        ),
    ],
)
def test_malformed_reports_say_what_is_wrong(tmp_path: Path, capsys: Any, content: Any, message: str) -> None:
    path = tmp_path / "report.json"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and str(path) in err
    assert not message or err.startswith(f"megagraph report: {path}: {message}")


def test_leases_are_read_from_the_files_of_all_stages_and_wrong_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_report([MODEL], path, stages=3, leases=LEASES)
    write_report([MODEL], tmp_path / "run.stage2.json", leases={"stage 2": [[0, True, 5, 6]]})
    found = read_leases(path)
    assert [*found] == ["stage 0", "stage 2"]  # that of stage 1 is not there
    assert found["stage 0"] == [(0, True, 1.0, 4.0), (1, False, 2.0, None)]
    # Bug: a stage's file, which is read as well, was written over.
    assert main(["report", str(path), "--json", str(tmp_path / "run.stage2.json")]) == 2
    write_report([MODEL], tmp_path / "run.stage1.json", leases={"stage 1": [[0]]})
    with pytest.raises(ValueError, match=r"run\.stage1\.json: leases\.stage 1: expected .*, got \[0\]"):
        read_leases(path)
    write_report([MODEL], path)
    assert read_leases(path) == {}


WRONG = [
    *(3, [0, True, 1.0], [0, True, 1.0, 4.0, 5.0], ["0"] * 4),
    *([-1, True, 1.0, 4.0], [True, True, 1.0, 4.0], [0, 1, 1.0, 4.0]),
    *([0, True, None, 4.0], [0, True, True, 4.0], [0, True, 1.0, "4"], [0, True, 4.0, 1.0]),
    # Which JSON has, and no drawing.
    *([0, True, 10**400, None], [0, True, float("nan"), 4.0], [0, True, 1.0, float("inf")]),
]


@pytest.mark.parametrize("leases", [[], None, {"a": 3}, *({"a": [[0, True, 1.0, 4.0], it]} for it in WRONG)])
def test_leases_of_another_kind_are_named_with_what_was_expected(path: Path, leases: Any) -> None:
    write_report([MODEL], path, leases=leases)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: leases.*: expected"):
        read_leases(path)


def test_a_reader_that_has_gone_ends_a_command_in_silence_and_a_full_disk_with_a_sentence(path: Path) -> None:
    """A BrokenPipeError with its traceback; Python's own exit code 120 without a word."""
    write_report([MODEL] * 500, path)  # more than a pipe holds
    gone, pipe = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "megagraph", "report", str(path), "--json"]
    with open("/dev/full", "w") as full, os.fdopen(pipe, "w") as closed:
        for out, code, said in ((closed, 141, ""), (full, 74, "megagraph report: --json: No space left")):
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
            assert done.returncode == code and done.stderr.startswith(said) and len(done.stderr) < 99


def test_the_command_draws_a_timeline_and_says_so(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    path, image = tmp_path / "run.json", tmp_path / "slots.svg"
    write_report([MODEL], path, leases=LEASES)
    assert main(["report", str(path), "--timeline", str(image)]) == 0
    assert capsys.readouterr().out == f"wrote {image}\n"
    drawn = image.read_text()
    assert "stage 0, slot 0" in drawn and "stage 0, slot 1" in drawn
    with pytest.raises(SystemExit, match="2"):
        main(["report", "run.json", "--json", "--timeline", "slots.png"])
    assert "not allowed with argument --json" in capsys.readouterr().err


def test_what_cannot_be_drawn_ends_with_2_and_writes_nothing(path: Path, capsys: Any) -> None:
    for leases, image, message in (
        ({}, "slots.png", "no model chunk has had several slots"),
        (LEASES, "gone/slots.png", "gone/slots.png"),
    ):
        write_report([MODEL], path, leases=leases)
        assert main(["report", str(path), "--timeline", str(path.parent / image)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("megagraph report: ") and message in err
        assert [*path.parent.iterdir()] == [path]


# -- the line at the end ---------------------------------------------------------------------------


def ran(replays: int, needed: tuple[int, int, int] | None = None, **eager: int) -> dict[str, Any]:
    most = None if needed is None else dict(zip(("tokens", "num_seqs", "max_seqlen"), needed, strict=True))
    calls = replays + sum(eager.values())
    return {"calls": calls, "replays": replays, "eager": eager, "most_needed": most}


RAISE_IT = "TOO_MANY_SEQUENCES: raise cuda_graph_max_packed_seqs (num_seqs in capacities)"
FAILURES = {"failures": ["layer 0 stays eager (FOREIGN_HOOK): a hook", "a value is new"]}
NO_MODEL = "nothing replayed: no GPTModel or HybridModel ran a forward"


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        *((reports, f"{NO_MODEL} through get_forward_backward_func()") for reports in ([], [ran(0)])),
        ([ran(10)], "100 % of layer calls replayed"),
        ([ran(999, WARMING_UP=1)], "99 % of layer calls replayed; the rest warmed up"),
        (
            [ran(82, (60, 7, 9), WARMING_UP=3, TOO_MANY_SEQUENCES=15)],
            f"82 % of layer calls replayed; 15 % eager, {RAISE_IT} to 8 (packs held up to 7)",
        ),
        (
            [ran(9, (60, 8, 9), TOO_MANY_SEQUENCES=1), ran(9, (60, 33, 9), NESTING=1)],
            f"90 % of layer calls replayed; 5 % eager, {RAISE_IT}",
        ),
        (
            [ran(0, (640, 7, 9), TOO_MANY_TOKENS=15)],
            "nothing replayed: 100 % eager, TOO_MANY_TOKENS: raise max_seqlen_per_dp_cp_rank (tokens in",
        ),
        (
            [ran(0, (60, 7, 31), SEQUENCE_TOO_LONG=15)],
            "nothing replayed: 100 % eager, SEQUENCE_TOO_LONG: drop max_seqlen, or raise it to 31 (documents",
        ),
        ([ran(0, NO_PACK_METADATA=2)], "nothing replayed: 100 % eager, NO_PACK_METADATA: pass the pack"),
        ([ran(0, WARMING_UP=2)], "nothing replayed: 100 % eager, WARMING_UP: nothing to do in the first"),
        (
            [ran(0, SCOPE_UNSUPPORTED=9) | {"failures": ["GPTModel with fp8 is not supported yet"]}],
            "nothing replayed: 100 % eager, SCOPE_UNSUPPORTED: change what the log and the report name "
            "(GPTModel with fp8 is not supported yet)",
        ),
        (
            [ran(0, STATE_CHANGED=9) | FAILURES],
            "nothing replayed: 100 % eager, STATE_CHANGED: nothing to do if it is rare (a value is new)",
        ),
        ([ran(999, OF_LATER=1)], "99 % of layer calls replayed; under 1 % eager, OF_LATER: see docs/reasons"),
    ],
)
def test_the_line_at_the_end_says_what_was_replayed_what_ran_eager_and_what_to_do(
    reports: list[dict[str, Any]], said: str
) -> None:
    assert verdict(reports).startswith(said)
    assert "\n" not in verdict(reports)


def test_what_graphs_save_is_told_if_eager_steps_were_measured() -> None:
    times = {kind: {"host_ms": [ms, ms + 1, ms + 2]} for kind, ms in (("eager", 8.0), ("graphed", 2.0))}
    assert saved(times).endswith("9.0 ms (8.0 to 10.0) eager, 3.0 ms (2.0 to 4.0) graphed")
    assert saved({**times, "eager": {"host_ms": None}}) == saved({}) == ""


# -- when slots were in use --------------------------------------------------------------------------


ENDED = [Lease(slot=it % 2, grad=it < 90, begin=float(it), end=it + 1.5) for it in range(100)]
TIMES = {
    "GPTModel (stage 0)": [*ENDED, Lease(slot=0, grad=True, begin=100.0, end=None)],
    "GPTModel (stage 1)": [],
}


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [(".PNG", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml"), (".docx", None), ("", None)],
)
def test_the_ending_says_which_kind_of_image_it_is(tmp_path: Path, suffix: str, begins: bytes | None) -> None:
    """A drawing leaves nothing behind: neither in pyplot nor in the settings of a process that draws more."""
    path, before = tmp_path / f"slots{suffix}", dict(matplotlib.rcParams)
    # Without an ending matplotlib adds one, and the file that was asked for is not there.
    message = rf"slots{suffix}: expected an .*png.*svg"
    with nullcontext() if begins else pytest.raises(ValueError, match=message):
        draw_timeline(TIMES, path)
    assert [*tmp_path.iterdir()] == ([path] if begins else [])
    assert begins is None or path.read_bytes().startswith(begins)
    assert pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_each_slot_has_a_line_with_its_name_and_the_chunk_s(tmp_path: Path) -> None:
    """Also where a name would be a formula to matplotlib; and lines are as many as slots that there are."""
    path = tmp_path / "slots.svg"
    draw_timeline({r"$\chunk$": [Lease(slot=slot, grad=True, begin=1, end=2) for slot in (0, 10**9)]}, path)
    drawn = path.read_text()
    assert r"$\chunk$, slot 0" in drawn and r"$\chunk$, slot 1000000000" in drawn


def test_what_chunks_recorded_is_drawn_of_the_last_leases(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """What was held when the report was written is held to the end; what ended at 0 is not."""
    bars: list[list[tuple[float, float]]] = []  # by line and colour
    monkeypatch.setattr("matplotlib.axes.Axes.broken_barh", lambda _axes, drawn, *_, **__: bars.append(drawn))
    often = [
        *(Lease(slot=0, grad=True, begin=begin, end=begin + 2) for begin in (-9.0, -2.0, -1.0, 4.0)),
        Lease(slot=1, grad=False, begin=2.0, end=None),
    ]
    seldom = [Lease(slot=0, grad=True, begin=0.0, end=10.0), Lease(slot=1, grad=True, begin=1.0, end=None)]
    draw_timeline({"often": often, "seldom": seldom}, tmp_path / "slots.png")
    training, forward_only = bars[::2], bars[1::2]
    assert training == [[(0.0, 1.0), (4.0, 2.0)], [], [(0.0, 10.0)], [(1.0, 9.0)]]
    assert forward_only == [[], [(2.0, 8.0)], [], []]
    bars.clear()
    draw_timeline(TIMES, tmp_path / "slots.png")
    # Those of 69 to 100, of which the last one has no end, and has not begun before the others' end.
    drawn = sorted(bar for some in bars for bar in some)
    assert drawn == [*((place, 1.5) for place in range(31)), (31.0, 0.5)]


def test_what_cannot_be_drawn_names_the_remedy(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_timeline(TIMES, tmp_path / "slots.png")
