"""Stage 1's money: what is spent is counted whatever becomes of it, and a cap holds."""

import pytest
from model_server import serving
from test_annotate import config, data, tokens, written  # noqa: F401  (data is a fixture)

from annotate import main, stats
from bench import annotate as bench
from demo import teacher
from runtime import UserError

GOOD = bench.GOOD
SIX = bench.SIX


def test_what_a_quarantined_answer_cost_is_not_forgotten(data, tmp_path, capsys):
    with serving(lambda *request: SIX) as server:
        cfg = config(data, server, tmp_path, limit=3)
        main(cfg)
        spent = tokens(written(cfg)[1])
        for _ in range(2):  # the cap stops it, so that they are in no file but the third
            with pytest.raises(UserError, match="--max_tokens"):
                main(config(data, server, tmp_path, limit=3, retry_quarantined=True, max_tokens=spent + 9))
        assert written(cfg) == ([], []) and len(server.requests) == 6
        server.answer = lambda *request: GOOD
        main(cfg)
        lines, _ = written(cfg)
        assert len(lines) == 3 and len(server.requests) == 9
        assert tokens(lines) > spent and all(o["usage"]["output"] > 2 * (len(SIX) // 4) for o in lines)
        stats(cfg)
    assert f"{tokens(lines):,} tokens" in capsys.readouterr().out.splitlines()[-2]


def test_spending_cap(data, tmp_path, capsys):
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path, max_tokens=4000, concurrency=1, encoders=1)
        with pytest.raises(UserError, match="--max_tokens is 4,000; the same command"):
            main(cfg)
        lines, _ = written(cfg)
        spent = sum(o["usage"]["input"] + o["usage"]["output"] for o in lines)
        assert 0 < len(lines) < 12 and spent <= 4000 and len(server.requests) == len(lines)
        with pytest.raises(UserError, match="--max_dollars is 0.001"):
            main(config(data, server, tmp_path, max_dollars=0.001))
        assert len(server.requests) == len(lines)
        main(config(data, server, tmp_path))
    assert len(written(cfg)[0]) == len(server.requests) == 12


def test_a_cap_holds_from_the_first_question_on(data, tmp_path):
    with serving(lambda *request: GOOD) as server:
        with pytest.raises(UserError, match="--max_tokens is 1;"):
            main(config(data, server, tmp_path, max_tokens=1))
        assert len(server.requests) == 1
        server.answer = lambda path, body, headers: (
            teacher.reply(path, GOOD, "", "a-model", {}) | {"usage": None})
        with pytest.raises(UserError, match="counts no tokens"):
            main(config(data, server, tmp_path, max_dollars=9.0))
        assert len(server.requests) < 2 + 10


def test_stats(data, tmp_path, capsys):
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path, limit=6)
        with pytest.raises(UserError, match="no annotations"):
            stats(cfg)
        main(cfg)
        capsys.readouterr()
        stats(cfg)
    shown = capsys.readouterr().out.splitlines()
    web, total = (next(o.split() for o in shown if o.startswith(name)) for name in ("Web", "Total"))
    assert web == ["Web", "6", "2.00", "0.0%", "24,311", "2.73", "1.5%"]
    assert total == ["Total", "6", "2.00", "0.0%", "76,396", "2.56", "1.6%"]
    assert shown[-2].startswith("cost so far $0.0")
    assert shown[-1].startswith("left about 6 trajectories, $0.0")
