"""Stage 1 by the Batch API: half the price, and nothing that is paid for is lost or paid for twice."""

import json
from pathlib import Path

import pytest
from model_server import serving
from test_annotate import asked_for, config, data, tokens, written  # noqa: F401  (data is a fixture)

import annotate
import runtime
from annotate import main, stats
from bench import annotate as bench
from runtime import UserError

GOOD = bench.GOOD
SIX = bench.SIX


def test_batch(data, tmp_path, monkeypatch):
    def answer(path, body, headers):
        live = bool(headers)
        return {"Task number 1": GOOD if live else SIX, "Task number 2": SIX,
                "Task number 3": (400, {"error": {"message": "too big"}})}.get(asked_for(body), GOOD)
    with serving(answer) as server:
        cfg = config(data, server, tmp_path, batch=True, batch_requests=5, batch_poll=0.05)
        results = annotate.Batches.run

        def killed(self, questions):
            for i, result in enumerate(results(self, questions)):
                if i == 3:
                    raise RuntimeError("killed")
                yield result
        monkeypatch.setattr(annotate.Batches, "run", killed)
        with pytest.raises(RuntimeError):
            main(cfg)
        monkeypatch.undo()
        main(cfg)
        lines, left = written(cfg)
        assert bench.outcome(Path(cfg.out), 12) == {"annotated": 10, "quarantined": 2, "lost": 0,
                                                    "duplicated": 0}
        assert sorted(o["reason"][:8] for o in left) == ["HTTP 400", "malforme"]
        sent = [json.loads(o) for b in server.batches.values()
                for o in server.files[b["input_file_id"]].splitlines()]
        assert len(sent) == 12 and len(server.batches) == 3  # nothing was paid for twice
        assert len(server.requests) == 2  # the two malformed ones, asked again in the same conversation
        assert all(len(body["input"]) == 3 for _, body, _ in server.requests)
        batch = {o["usage"].get("batch_output", 0) for o in [*lines, *left]}
        assert batch == {len(GOOD) // 4, len(SIX) // 4, 0}  # no answer is counted twice; 0: HTTP 400
        asked_twice = [o for o in [*lines, *left] if "output" in o["usage"]]  # at the full price
        assert len(asked_twice) == 2 and all(o["usage"]["output"] < 200 for o in asked_twice)
        main(cfg)
        assert len(server.batches) == 3 and len(server.requests) == 2


def batch_config(data, server, tmp_path, **more):
    return config(data, server, tmp_path, batch=True, batch_poll=0.05, **more)


def test_what_a_batch_left_open_is_asked_by_the_next_run(data, tmp_path):
    bad = {"Task number 1": None, "Task number 2": (503, {}), "Task number 3": (429, {})}
    with serving(lambda path, body, headers: bad.get(asked_for(body), GOOD)) as server:
        cfg = batch_config(data, server, tmp_path)
        with pytest.raises(UserError, match="3 questions were left open; the last: .*the same command"):
            main(cfg)
        assert [len(o) for o in written(cfg)] == [9, 0]
        bad.clear()
        main(cfg)
        assert [len(o) for o in written(cfg)] == [12, 0] and not server.requests and len(server.batches) == 2


def test_malformed_answers_of_a_batch_survive_what_ends_the_run(data, tmp_path, capsys):
    def answer(path, body, headers):
        return GOOD if headers or asked_for(body)[-1] not in "035" else SIX
    with serving(answer) as server:
        cfg = batch_config(data, server, tmp_path, batch_requests=4, batch_open=1)
        create = server.create
        server.create = lambda body: create(body) if len(server.batches) < 2 else 1 / 0
        server.handle_error = lambda *a: None
        with pytest.raises(UserError, match="batches:.*goes on from here"):  # the third one is not accepted
            main(cfg)
        server.create = create
        lines, left = written(cfg)
        again = runtime.read_jsonl(f"{cfg.out}.again.jsonl")
        assert len(lines) == 5 and len(again) == 3 and not left
        capsys.readouterr()
        stats(cfg)
        assert f"{tokens(lines + again):,} tokens" in capsys.readouterr().out  # they are paid for

        with pytest.raises(UserError, match="4 questions are under way in batches: go on with --batch"):
            main(config(data, server, tmp_path))
        with pytest.raises(UserError, match="--max_tokens is 9"):
            main(batch_config(data, server, tmp_path, max_tokens=9))
        main(cfg)
        lines, left = written(cfg)
        assert len(lines) == 12 and not left and len(server.batches) == 3
        assert len(server.requests) == 4 and all(len(body["input"]) == 3 for _, body, _ in server.requests)
        assert sum("output" in o["usage"] for o in lines) == 4
        assert all("batch_output" in o["usage"] for o in lines)


def test_a_cap_counts_what_is_in_batches(data, tmp_path):
    with serving(lambda *request: GOOD) as server:
        with pytest.raises(UserError, match="price of a question is not known: run --limit 20 first"):
            main(batch_config(data, server, tmp_path, max_dollars=5.0))
        assert not server.batches
        main(config(data, server, tmp_path, limit=2))
        price = tokens(written(config(data, server, tmp_path))[0]) / 2
        with pytest.raises(UserError, match="--max_tokens"):
            main(batch_config(data, server, tmp_path, max_tokens=int(6.5 * price), batch_requests=3))
        lines, _ = written(config(data, server, tmp_path))
        assert len(lines) == 6 and tokens(lines) <= 6.5 * price and len(server.batches) == 2


def test_irregularities_are_counted_once_also_by_batch(tmp_path, capsys):
    data = bench.make_data(tmp_path / "d", 3)
    file = tmp_path / "d/annotations.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n")
    with serving(lambda path, body, headers: GOOD if headers else SIX) as server:
        main(batch_config(data, server, tmp_path))
        assert len(server.requests) == 3
    assert "in the data: 1 the same step twice" in capsys.readouterr().out
