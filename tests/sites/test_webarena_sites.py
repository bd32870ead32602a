"""replicas.py: sites.json, and leases between threads and processes."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime import UserError
from sites.webarena.replicas import Leases, Replica, Site, SiteError, fetch, load_sites, on_form, reset

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def sites_file(tmp_path, thing):
    (tmp_path / "sites.json").write_text(thing if isinstance(thing, str) else json.dumps(thing))
    return tmp_path / "sites.json"


def site(name="reddit", n=1, reset=""):
    return Site(name, tuple(Replica(name, f"http://h{i}", reset) for i in range(n)), {})


def test_every_form_of_an_entry(tmp_path):
    sites = load_sites(sites_file(tmp_path, {
        "shopping": "http://a:1/", "gitlab": ["http://a:2", "http://b:2"], "wikipedia": None,
        "reddit": {"address": ["http://a:3", "http://b:3"], "reset": "make {port}",
                   "account": {"username": "u", "password": "p"}},
        "map": {"address": "http://a:4"},
        "shopping_admin": {"address": ["http://a:5/admin", "http://b:5/admin"], "reset": ["r1", "r2"]}}))
    assert sites["shopping"].replicas == (Replica("shopping", "http://a:1", ""),
                                          ) and sites["wikipedia"] is None
    assert [r.address for r in sites["gitlab"].replicas] == ["http://a:2", "http://b:2"]
    assert [r.reset for r in sites["reddit"].replicas] == ["make {port}"] * 2
    assert sites["reddit"].accounts == {"reddit": ("u", "p")}
    assert [r.reset for r in sites["shopping_admin"].replicas] == ["r1", "r2"]


@pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
def test_scalecuas_own_file_is_read():
    sites = load_sites(DATA / "scalecua/webarena_lite_v2/webarena_url.json")
    assert sites["shopping_admin"].replicas[0].address == "http://10.140.52.49:6667/admin" and len(sites) == 5


@pytest.mark.parametrize("thing, message", [
    ("{", "give a JSON object"), ([], "not a JSON object"), ({"shop": "http://a"},
                                                             "no site is called 'shop'"),
    ({"reddit": "a:9999"}, "'a:9999' is no address"), ({"reddit": []}, "needs an address"),
    ({"reddit": ["http://a", 7]}, "7 is no address"), ({"reddit": {"adress": "http://a"}},
                                                       "unknown keys adress"),
    ({"reddit": {"address": ["http://a", "http://b"], "reset": ["x", "y", "z"]}},
     "one reset or one per address"),
    ({"reddit": {"address": "http://a", "account": {"user": "u"}}}, "needs username and password")])
def test_a_faulty_file_is_one_clear_error(thing, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_sites(sites_file(tmp_path, thing))
    with pytest.raises(UserError, match="nowhere.json"):
        load_sites(tmp_path / "nowhere.json")


def test_readers_share_and_a_writer_is_alone(tmp_path):
    leases, s = Leases(tmp_path, timeout=0.3), site()
    a, b = leases.acquire([(s, False)])[0], leases.acquire([(s, False)])[0]
    with pytest.raises(SiteError, match="no replica became free"):
        leases.acquire([(s, True)])
    a.release()
    b.release()
    writer, = leases.acquire([(s, True)])
    for exclusive in (False, True):
        with pytest.raises(SiteError):
            leases.acquire([(s, exclusive)])
    writer.release()
    assert leases.acquire([(s, False)])[0].order == 4     # those that waited in vain do not count


def test_replicas_are_used_in_turn_and_two_writers_get_one_each(tmp_path):
    leases, s = Leases(tmp_path, timeout=0.3), site(n=2)
    got = [leases.acquire([(s, True)])[0] for _ in range(2)]
    assert {x.replica.address for x in got} == {"http://h0", "http://h1"}
    with pytest.raises(SiteError):
        leases.acquire([(s, False)])
    for lease in got:
        lease.release()
    orders = []
    for _ in range(4):
        lease, = leases.acquire([(s, False)])
        orders.append((lease.replica.address, lease.order))
        lease.release()
    assert sorted(orders) == [("http://h0", 2), ("http://h0", 3), ("http://h1", 2), ("http://h1", 3)]


def test_a_reset_is_due_for_every_writer_and_for_a_reader_after_one(tmp_path):
    leases, s = Leases(tmp_path), site(reset="true")

    def visit(exclusive):
        lease, = leases.acquire([(s, exclusive)])
        if lease.reset:
            lease.cleaned()
        lease.release()
        return lease.reset
    assert [visit(w) for w in (False, True, True, False, False)] == [False, True, True, True, False]
    assert not leases.acquire([(site(), True)])[0].reset          # none is configured


def test_all_sites_or_none(tmp_path):
    leases, a, b = Leases(tmp_path, timeout=0.3), site("gitlab"), site("reddit")
    held, = leases.acquire([(b, True)])
    with pytest.raises(SiteError, match="reddit"):
        leases.acquire([(b, False), (a, True)])
    assert [x.replica.site for x in leases.acquire([(a, True)])] == ["gitlab"]      # it was given back
    held.release()


def test_a_writer_is_not_starved_by_readers(tmp_path):
    leases, s, done, readers = Leases(tmp_path, timeout=20), site(), threading.Event(), []

    def read():
        while not done.is_set():
            lease, = leases.acquire([(s, False)])
            done.wait(0.1)
            lease.release()
            readers.append(1)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for t in threads:
        t.start()
        time.sleep(0.013)
    start = time.monotonic()
    leases.acquire([(s, True)])[0].release()
    took = time.monotonic() - start
    done.set()
    for t in threads:
        t.join()
    assert took < 10 and readers


def test_twenty_threads_never_overlap(tmp_path):
    leases, s, busy, most = Leases(tmp_path, timeout=60), site(n=2), {}, []

    def work():
        lease, = leases.acquire([(s, True)])
        busy[lease.replica] = busy.get(lease.replica, 0) + 1
        most.append(busy[lease.replica])
        threading.Event().wait(0.005)
        busy[lease.replica] -= 1
        lease.release()
    threads = [threading.Thread(target=work) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert max(most) == 1 and len(most) == 20


HOLD = """
import sys
sys.path.insert(0, {root!r})
from sites.webarena.replicas import Leases, Replica, Site
lease, = Leases({folder!r}).acquire([(Site("reddit", (Replica("reddit", "http://h0"),), {{}}), True)])
print(lease.order, flush=True)
sys.stdin.read()
"""


def test_another_process_holds_the_lease_and_its_death_frees_it(tmp_path):
    code = HOLD.format(root=str(ROOT), folder=str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline().strip() == b"1"
    leases = Leases(tmp_path, timeout=0.3)
    with pytest.raises(SiteError):
        leases.acquire([(site(), False)])
    other.kill()
    other.wait()
    assert leases.acquire([(site(), False)])[0].order == 2
    other.stdin.close()
    other.stdout.close()


def test_closing_ends_the_wait(tmp_path):
    leases, s = Leases(tmp_path, timeout=60), site()
    leases.acquire([(s, True)])
    threading.Timer(0.2, leases.close).start()
    start = time.monotonic()
    with pytest.raises(SiteError):
        leases.acquire([(s, True)])
    assert time.monotonic() - start < 5


def test_a_reset_command_gets_the_replicas_address_and_its_failure_is_told(tmp_path):
    replica = Replica("reddit", "http://h:9999",
                      f"{sys.executable} -c 'import sys; open(sys.argv[1], \"w\")' "
                                                 f"{tmp_path}/{{host}}.{{port}}")
    reset(replica, 30)
    assert (tmp_path / "h.9999").exists()
    for command in ("no-such-command-here", f"{sys.executable} -c 'raise SystemExit(3)'"):
        with pytest.raises(SiteError, match="reset of reddit at http://h"):
            reset(Replica("reddit", "http://h", command), 30)


def test_a_site_that_does_not_answer_is_a_site_error():
    with pytest.raises(SiteError, match="does not answer"):
        fetch("http://127.0.0.1:9/")


def test_the_log_in_form_is_recognised():
    shop, office = Replica("shopping", "http://h"), Replica("shopping_admin", "http://h/admin")
    assert on_form("http://h/customer/account/login/referer/x", shop) and not on_form("http://h/cart", shop)
    assert not on_form("http://h/admin/", office)       # its form stands at every address
