"""The drawings: the text line by line, the PNG by what is in it, and the command that makes both."""

from __future__ import annotations

import builtins
import io
import itertools
import re
import struct
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from rich.console import Console

import jax_kvcanary as kvc
from helpers.dumps import CREATED, crowded, make_dump
from helpers.incidents import INCIDENTS, small
from jax_kvcanary import cli
from jax_kvcanary import dump as dump_module
from jax_kvcanary.picture.incident import FindingKind, Incident
from jax_kvcanary.picture.png import draw, save
from jax_kvcanary.picture.style import KIND_MARKERS
from jax_kvcanary.picture.text import print_incident

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """The dump of each fault, with the engine's table and without."""
    folder = tmp_path_factory.mktemp("dumps")
    paths = {}
    for name, function in INCIDENTS.items():
        server = function()
        paths[name] = server.dump(folder / name)
        paths[f"{name} bare"] = server.dump(folder / f"{name}_bare", table=False, steps=False, pool=False)
    return paths


@pytest.fixture(scope="module")
def incidents(dumps):
    return {name: Incident.of(kvc.load_dump(path)) for name, path in dumps.items()} | {"flood in a large pool": large_flood()}


@pytest.fixture(scope="module")
def figures(incidents):
    return {name: draw(incident) for name, incident in incidents.items()}


def large_flood():
    """5,000 findings of two kinds in 20,011 slots, of which the log kept 1,000."""
    records, slots = crowded(20_011, 25, 700)
    found = np.repeat(np.random.default_rng(1).choice(slots.reshape(-1), 500, replace=False), 2).tolist()
    rows = [(i % 2 * 2, s, records[s, 1], 7, 8, 5, 5, (4, 36, 1, 32)[i % 4]) for i, s in enumerate(found)]
    return Incident.of(make_dump(records, rows, count=5000, steps=[3 + i // 100 for i in range(1000)]))


NAMES = [*INCIDENTS, *(f"{name} bare" for name in INCIDENTS), "flood in a large pool"]


def text_of(incident, width=100, **options):
    file = io.StringIO()
    print_incident(incident, Console(file=file, width=width, color_system=None, **options))
    return file.getvalue()


# Text.


class FixedClock(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return CREATED.astimezone(tz)


def test_the_text_in_the_readme_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dump_module, "datetime", FixedClock)
    monkeypatch.chdir(tmp_path)
    small().dump(tmp_path / "incident.npz")
    command, shown = re.search(
        r"```console\n\$ python -m jax_kvcanary (report .*?)\n(.*?)```", README.read_text("utf-8"), re.DOTALL
    ).groups()
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == shown.replace("jax_kvcanary 0.1.0", f"jax_kvcanary {kvc.__version__}")


def test_the_map_has_a_sign_for_each_slot(incidents):
    """Against the states, slot by slot."""
    incident = incidents["double_handout"]
    lines = text_of(incident).splitlines()
    at = lines.index("Slot map, one slot each")
    got = "".join(line[5:] for line in lines[at + 1 : at + 5])
    assert len(got) == 211
    quarters = np.clip(incident.age * 4, 0, 3).astype(int)
    for slot, sign in enumerate(got):
        state = incident.state[slot]
        want = "X" if slot in incident.marked else "·0-░?BA"[state] if state != 3 else "░▒▓█"[quarters[slot]]
        assert sign == want, slot
    assert (got[134], got[108], got[0]) == ("X", "X", "0")


def test_lines_of_a_small_map():
    records, slots = crowded(17, 1, 4)
    a = slots[0].tolist()
    incident = Incident.of(make_dump(records, [(2, a[2], 2, 7, -1, 5, 5, 4)], steps=[9]))
    assert a == [1, 2, 3, 4]
    lines = text_of(incident).splitlines()
    assert lines[lines.index("") + 1 :] == [
        "Slot map, one slot each",
        " 0  0AAXA············",
        "    X    finding, KV bytes changed: 1 slot",
        "    A    request A (4 slots, ends in slot 4), where the finding is",
        "    ·    empty (never written, or released): 12 slots",
        "    0    slot 0, padding",
        "",
        "Request A around slot 3",
        "position  slot  holds  token  expected  follows  wrong",
        f"       0     1      0  {records[1, 0]:>5}         -  yes",
        f"       1     2      1  {records[2, 0]:>5}         -  yes",
        f"       2     3      2  {records[3, 0]:>5}         -  yes      KV bytes",
        f"       3     4      3  {records[4, 0]:>5}         -  yes",
        "",
        "Timeline",
        "step  findings  launch       wrong     slots",
        "   9         1  TAIL_K_FULL  KV bytes      3",
        "",
        "Slot 3 was written again after the finding: the map and the strip show it as it is now.",
        "Records carry no time: the shade is the position in the request, light for 0, dark for 3. A released",
        "record looks like one that was never written.",
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", NAMES)
def test_lines_fit_the_width(incidents, name, width):
    lines = text_of(incidents[name], width).splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    assert " ".join(lines).startswith(incidents[name].title)


def test_cells_of_many_slots_show_every_finding():
    incident = large_flood()
    lines = text_of(incident).splitlines()
    at = lines.index("Slot map, 32 slots each")
    signs = "".join(line[8:] for line in lines[at + 1 : at + 11])
    assert [i for i, sign in enumerate(signs) if sign == "X"] == sorted({int(slot) // 32 for slot in incident.marked})
    assert len(signs) == -(-20_011 // 32)


def test_a_flood_hides_no_other_kind():
    """Of a timeline that is cut, every launch and combination of reasons stays."""
    records, slots = crowded(211, 3, 11)
    rows = [(2 * (i % 2), slots[0, 1 + i % 9], 1, 7, -1, 5, 5, 4) for i in range(90)] + [(5, slots[1, 1], 1, 7, 8, 5, 5, 32)]
    lines = text_of(Incident.of(make_dump(records, rows))).splitlines()
    at = lines.index("Timeline, in the order of the log: the dump has no steps")
    assert lines[at + 2].split() == ["0", "1", "HEAD_K_FULL", "KV", "bytes", str(slots[0, 1])]
    assert lines[at + 17].split() == ["90", "1", "SWEEP_V_FULL", "token", str(slots[1, 1])]
    assert lines[at + 18] == "and 75 more lines like these"


def test_colours_are_left_out_unless_wanted(incidents):
    assert "\x1b[" not in text_of(incidents["flood"], force_terminal=True)
    file = io.StringIO()
    print_incident(incidents["flood"], Console(file=file, width=100, color_system="256", force_terminal=True))
    assert "\x1b[1;37;41mX\x1b[0m" in file.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) == text_of(incidents["flood"])


# PNG.


def axes_of(figure, name):
    return next(axes for axes in figure.axes if axes.get_label() == name)


def texts(figure, gid):
    return [text.get_text() for text in figure.findobj(Text) if text.get_gid() == gid and text.get_text()]


def artists(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_says_what_the_incident_says(incidents, figures, name):
    incident, figure = incidents[name], figures[name]
    assert " ".join(texts(figure, "headline")[0].split()) == incident.headline
    assert texts(figure, "tally") == [incident.tally]
    assert " ".join(texts(figure, "notes")[0].split()) == " ".join(incident.notes)
    legend = [" ".join(text.get_text().split()) for text in axes_of(figure, "legend").get_legend().get_texts()]
    assert [text for _, text in incident.legend] == legend[-len(incident.legend) :]
    assert len(texts(figure, "strip title")) == len(incident.strips)
    cells = [cell for strip in incident.strips for cell in strip.cells]
    assert len(artists(figure, "cell")) + len(artists(figure, "wrong cell")) == len(cells)
    assert len(artists(figure, "wrong cell")) == sum(bool(cell.reasons) for cell in cells)
    assert len(artists(figure, "link broken")) == sum(cell.follows is False for cell in cells)
    for cell in cells:
        assert f"slot {cell.slot}" in texts(figure, "cell text")
    assert len(texts(figure, "total")) == len(incident.counters)


@pytest.mark.parametrize("name", NAMES)
def test_the_map_marks_the_cells_with_findings(incidents, figures, name):
    incident, figure = incidents[name], figures[name]
    image = axes_of(figure, "map").images[0].get_array()
    rows, columns, _ = image.shape
    slots_per_cell = 1
    while rows * columns * slots_per_cell < incident.pool.num_slots:
        slots_per_cell *= 2
    marked = {}
    for kind in FindingKind:
        for collection in artists(figure, f"found {kind.name}"):
            marked |= dict.fromkeys([int(y) * columns + int(x) for x, y in collection.get_offsets()], kind)
    want = {}
    for slot, kind in zip(incident.marked.tolist(), incident.marked_kind.tolist(), strict=True):
        cell = slot // slots_per_cell
        want[cell] = min(want.get(cell, FindingKind.RANGE), kind)
    assert marked == want
    on_map = incident.finding is not None and 0 <= incident.finding.slot < incident.pool.num_slots
    rings = artists(figure, "focus")
    assert len(rings) == on_map
    if on_map:
        x, y = rings[0].get_offsets()[0]
        assert int(y) * columns + int(x) == incident.finding.slot // slots_per_cell
        assert f"slot {incident.finding.slot}" in [text.get_text() for text in axes_of(figure, "map").texts]


def test_the_timeline_has_a_mark_for_each_step_and_launch(figures):
    figure = figures["double_handout"]
    (found,) = artists(figure, "timeline RECORD")
    assert sorted(map(tuple, found.get_offsets().tolist())) == [(step, lane) for step in (10, 11, 12) for lane in (0, 1)]
    timeline = axes_of(figure, "timeline")
    assert [label.get_text() for label in timeline.get_yticklabels()] == ["HEAD_K_FULL", "TAIL_K_FULL"]
    assert texts(figure, "total") == ["chain 6, position 3"] * 2
    full = figures["flood"]
    assert len(artists(full, "log full")) == 1
    assert texts(full, "total") == ["nothing in 858 entries", "KV bytes 456"]
    assert len(set(KIND_MARKERS.values())) == len(FindingKind)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_texts_of_a_picture_overlap(figures, name):
    figure = figures[name]
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and text.axes is not axes_of(figure, "map")
    ]
    assert len(boxes) > 15
    width, height = figure.canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        shared = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(shared) <= 0.5, (a, b)


def test_the_file_is_a_picture_of_the_right_size(tmp_path, incidents):
    path = tmp_path / "picture"
    save(incidents["double_handout"], path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width == 2100
    assert height == round(draw(incidents["double_handout"]).get_figheight() * 150)
    assert len(content) > 50_000


# The command.


def test_the_command_draws_both(tmp_path, dumps, capsys):
    picture = tmp_path / "picture.png"
    assert cli.main(["report", str(dumps["kv_flip"]), "-o", str(picture), "--no-color", "--width", "90"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("KV bytes of slot 86 (position 6 of request row 2) changed, and its record did not.")
    assert out.endswith(f"\nWrote {picture}\n")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_group_and_half_of_the_command(dumps, capsys):
    assert cli.main(["report", str(dumps["window"]), "--group", "FULL", "--half", "k"]) == 0
    assert capsys.readouterr().out.startswith("No finding in the FULL pool, but 4 findings in this dump.")
    assert cli.main(["report", str(dumps["window"]), "--half", "v"]) == 2
    assert capsys.readouterr().err == "`half` is 'v', but the SWA group of this dump has records of k alone.\n"
    assert cli.main(["report", str(dumps["sound"]), "--group", "SWA"]) == 2
    assert capsys.readouterr().err == "`group` is SWA, but this dump has the groups FULL.\n"


def test_files_that_cannot_be_drawn(tmp_path, dumps, capsys):
    bad = tmp_path / "bad"
    bad.write_text("no dump")
    assert cli.main(["report", str(bad)]) == 2
    assert capsys.readouterr().err == f"`path` is {str(bad)!r}, which is no dump, but it must be a whole file that `canary.dump` wrote.\n"
    assert cli.main(["report", str(tmp_path / "missing")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["report", str(dumps["sound"]), "-o", str(tmp_path / "missing" / "picture.png")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--width", "79"], ["--width", "x"], ["--group", "full"], ["--half", "q"], ["more"]])
def test_arguments_that_make_no_sense(dumps, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["report", str(dumps["sound"]), *arguments])
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_missing_packages_are_named(tmp_path, dumps, capsys, monkeypatch):
    real_import = builtins.__import__

    def without(package):
        def find(name, *args, **kwargs):
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return real_import(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", find)

    install = "`pip install 'jax-kvcanary[plot]'` installs it.\n"
    arguments = ["report", str(dumps["kv_flip"]), "-o", str(tmp_path / "picture.png")]
    without("rich")
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == f"rich is not installed, so there is no more text than this; {install}"
    assert captured.out.startswith(
        "KV bytes of slot 86 (position 6 of request row 2) changed, and its record did not. 2 findings in 1 slot"
    )
    assert (tmp_path / "picture.png").exists()
    monkeypatch.delitem(sys.modules, "jax_kvcanary.picture.png")
    without("matplotlib")
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == f"matplotlib is not installed, so there is no PNG; {install}"
    assert "Timeline" in captured.out


def test_the_program(dumps):
    """As a program of its own: no pyplot, no display, and the exit code."""
    program = "import sys; from jax_kvcanary import cli; code = cli.main(sys.argv[1:]); exit(code or 'matplotlib.pyplot' in sys.modules)"
    arguments = ["report", str(dumps["sound"]), "-o", str(dumps["sound"].parent / "sound.png")]
    assert subprocess.run([sys.executable, "-c", program, *arguments], check=False, capture_output=True).returncode == 0
    command = [sys.executable, "-m", "jax_kvcanary"]
    done = subprocess.run([*command, "report", "missing"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    helped = subprocess.run([*command, "--help"], check=False, capture_output=True, text=True)
    assert helped.returncode == 0
    assert "Draw the slot map and the findings of a dump, as text and as a PNG." in " ".join(helped.stdout.split())
