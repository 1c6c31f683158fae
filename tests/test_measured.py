"""bench.py measured: which rows it keeps, and what the page shows of them."""

import json

from benchmarks import measured, pages


def test_the_page_has_the_rows_that_are_kept():
    begin, end = "<!-- measured: begin -->\n\n", "\n<!-- measured: end -->"
    page = measured.PAGE.read_text()
    rows = pages.read_rows(measured.ROWS)
    assert page.split(begin)[1].split(end)[0] == measured.tables(rows)
    assert measured.README.read_text().split(begin)[1].split(end)[0] == measured.steps(rows)


def test_readme_has_what_was_chosen_and_the_fastest_of_the_same_code():
    step = a_step("step", 90.0) | ABOUT | {"pytorch": {"images_per_sec": 100.0}}
    variants = [a_step(name, rate) | ABOUT | {"section": "variants"} for name, rate in (("a", 150.0), ("b", 120.0))]
    other = a_step("c", 900.0) | ABOUT | {"section": "variants", "commit": "f" * 40}
    last = measured.steps([step, *variants, other]).splitlines()[-1]
    assert last == "| NVIDIA H200 | 100 | 90 | 0.90 | 1.50 | 2026-12-01, abcabcabcabc, jax 0.11.2 |"


ABOUT = {"device_kind": "NVIDIA H200", "devices": 1, "date": "2026-12-01", "commit": "abc" * 20}
ABOUT |= {"versions": {"jax": "0.11.2"}}


def a_step(name, images_per_sec):
    options = {"micro_batch_size": 5400, "storage": "normalised", "conv": "lax", "dtype": "bfloat16"}
    ms = {"median": 1e3, "min": 900.0, "max": 1100.0}
    figures = {"options": options, "ms": ms, "images_per_sec": images_per_sec}
    return {
        "section": "step",
        "name": name,
        "status": "measured",
        "batch_size": 100,
        "ours": figures,
        "pytorch": None,
    }


def test_new_rows_replace_those_of_their_name_and_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measured, "ROWS", tmp_path / "measured.json")
    monkeypatch.setattr(measured, "PAGE", tmp_path / "hardware.md")
    monkeypatch.setattr(measured, "README", tmp_path / "README.md")
    measured.README.write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    measured.PAGE.write_text("before\n<!-- measured: begin -->\n<!-- measured: end -->\nafter\n")
    about = {"device_kind": "NVIDIA H200", "devices": 1, "platform": "gpu", "date": "2026-12-01"}
    about |= {"command": "card", "versions": {"jax": "0.11.2"}, "git_commit": None, "code_sha256": "abc" * 20}
    skipped = {"section": "step", "name": "c", "status": "skipped", "reason": "no time"}
    first = [a_step("a", 100.0), a_step("b", 200.0), skipped]
    for rows in (first, [a_step("a", 300.0) | {"note": "no PyTorch"}]):
        (tmp_path / "card.json").write_text(json.dumps(about | {"rows": rows}))
        measured.print_measured(measured.bench_measured(str(tmp_path / "card.json")))
    assert [row["ours"]["images_per_sec"] for row in pages.read_rows(measured.ROWS)] == [300.0, 200.0]
    page = measured.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    row = (
        "| NVIDIA H200 | 100 | micro-batch 5,400, normalised, lax, bfloat16 | 1,000.00 (900.00 to 1,100.00) | 300 |"
    )
    assert f"{row} no PyTorch |  |  | 2026-12-01, abcabcabcabc, jax 0.11.2 |" in page
    assert "1 new rows; 2 in docs/measured.json" in capsys.readouterr().out
