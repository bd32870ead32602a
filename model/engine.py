"""Who generates in stage 3: this process with the trainer's own weights, or vLLM servers.

An engine has `models` (what rollout.Pool.run needs for each role), `sync(version)` (generate with the present
weights from here on; returns what to log), `clock()` (seconds of generation so far) and `close()`.

A role's servers are started like this, one per GPU, each on the role's stage-2 checkpoint:
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 vllm serve CHECKPOINT --enable-lora
        --max-lora-rank 32 --max-loras 2 --logprobs-mode processed_logprobs --generation-config vllm
        --limit-mm-per-prompt '{"image":1}'
They get each adapter by name from a directory that trainer and servers share; a name is never used twice, so
that no cache of an older one is read. What they say they read and wrote is what is trained, after checks:
prompt ids are those of our own encoding, there are as many log-probs as ids, a probe's log-probs are the
trainer's. Their distribution is the policy's (PAPER-GAP 3): softmax(logits / T), image and video ids masked
as `bad_words`, nothing else.

A server that does not answer is left out until it answers again and has the present adapter; its requests go
to the others. Where none is left for PATIENCE seconds, a request fails with a ConnectionError, which the
pool takes for infrastructure. An answer that cannot be trained on is a UserError: servers are set up wrongly.
"""

import asyncio
import contextlib
import io
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

from model.inputs import Sample, plain
from model.llm import image_url, messages_of
from model.policy import Policy
from model.remote import Remote
from model.roles import Role, addresses
from runtime import UserError, World, gather_objects

PATIENCE = 300.0                                  # s, how long a request waits for some server
ANSWER = 120.0                                    # s, longest answer; an episode has time for several tries
CONNECT = 5.0                                     # s until a host counts as gone
RETRY = 2.0                                       # s between two tries to reach a server that is down
KEEP = 2                                          # adapters on disk: a server may read one late


def load_engine(cfg, roles: list[Role], networks: dict, run: Path, world: World):
    """The engine that `--engine` names, for the roles that generate; those on servers of their own beside
    it."""
    policies = {role.name: networks[role.name] for role in roles if role.kind == "policy"}
    fixed = {role.name: Remote(role.name, role.model, role.urls, concurrency=cfg.threads)
             for role in roles if role.kind == "server"}
    if cfg.engine == "local":
        return Local(policies, fixed, bool(cfg.pipeline))
    directory = Path(cfg.adapters_dir or run / "adapters").absolute()
    clock = Clock()
    fleet = {name: Vllm(policies[name], urls, directory, cfg, world, clock)
             for name, urls in addresses(cfg, roles).items()}
    return Fleet(fleet, fixed, {role.name: role.mark for role in roles}, clock)


class Local:
    """This process. Generating ahead of the update needs a copy of the adapters, which `sync` renews."""

    def __init__(self, policies: dict[str, Policy], fixed: dict, ahead: bool):
        self.policies = policies
        self.samplers = {role: p.twin() for role, p in policies.items()} if ahead else policies
        self.models = {role: sampler.sample for role, sampler in self.samplers.items()} | fixed

    def sync(self, version: int) -> dict:
        for role, sampler in self.samplers.items():
            if sampler is not self.policies[role]:
                sampler.copy_adapter(self.policies[role])
        return {}

    def clock(self) -> Counter:
        return Counter()                          # the pool counts what it calls itself

    def close(self) -> None:
        """Nothing is open."""


class Clock:
    """Seconds in which some request, of whichever role and thread, was under way: `with clock:` is one."""

    def __init__(self):
        self.lock, self.flying, self.since, self.spent = threading.Lock(), 0, 0.0, 0.0

    def __enter__(self):
        with self.lock:
            self.since, self.flying = self.since if self.flying else time.monotonic(), self.flying + 1

    def __exit__(self, *_):
        with self.lock:
            self.flying -= 1
            self.spent += 0.0 if self.flying else time.monotonic() - self.since


class Fleet:
    """The servers of all roles; `marks`: role -> its letter in log keys."""

    def __init__(self, servers: "dict[str, Vllm]", fixed: dict, marks: dict[str, str], busy: Clock):
        self.servers = servers
        self.models = servers | fixed
        self.marks = marks
        self.busy = busy

    def sync(self, version: int) -> dict:
        return {f"{key}_{self.marks[role]}": value for role, servers in self.servers.items()
                for key, value in servers.push(version).items()}

    def clock(self) -> Counter:
        """Seconds in which some server wrote."""
        return Counter(generation=self.busy.spent)

    def close(self) -> None:
        for servers in self.servers.values():
            servers.close()


class Server:
    """One address. `live`: it answers and has the present adapter; `busy`: requests it has now."""

    def __init__(self, url: str):
        import openai
        self.url = url
        self.live = False
        self.busy = 0
        self.fault = "never reached"
        self.reviving: asyncio.Task | None = None
        self.client = openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("VLLM_API_KEY") or "none",
                                         timeout=openai.Timeout(ANSWER, connect=CONNECT), max_retries=0)

    @property
    def being_revived(self) -> bool:
        return self.reviving is not None and not self.reviving.done()

    async def post(self, path: str, **body) -> None:
        """One administrative call; an OpenAI error where it is refused."""
        await self.client.post(self.url.removesuffix("/v1") + path, body=body, cast_to=str)

    async def adapters(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def install(self, name: str, directory: Path) -> None:
        """Make the adapter known under its new name, and only this one of its role."""
        import openai
        known = await self.adapters()
        if name not in known:
            with contextlib.suppress(openai.NotFoundError):   # no such call: not in vLLM's development mode
                await self.post("/pause?mode=keep")
            try:
                await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(directory / name))
            except openai.BadRequestError:
                if name not in await self.adapters():         # else another trainer's process was faster
                    raise
            finally:
                with contextlib.suppress(openai.NotFoundError):
                    await self.post("/resume")
        for stale in (m for m in known if m.startswith(f"{name.split('-')[0]}-") and m != name):
            with contextlib.suppress(openai.NotFoundError):   # gone already
                await self.post("/v1/unload_lora_adapter", lora_name=stale)


class Vllm:
    """One role's servers; all their traffic is in one thread with an event loop of its own."""

    def __init__(self, policy: Policy, urls: list[str], directory: Path, cfg, world: World, clock: Clock,
                 patience: float = PATIENCE):
        self.policy, self.role, self.directory, self.cfg = policy, policy.role, directory, cfg
        self.world, self.clock, self.patience, self.adapter = world, clock, patience, ""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name=f"{self.role}'s servers").start()
        self.servers = [Server(url) for url in urls]
        self.banned = policy.inputs.tokenizer.convert_ids_to_tokens(policy.inputs.banned)

    def _wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    # ----------------------------------------------------------------------------------------------- requests
    def submit(self, request):
        """A Future of the request's Sample."""
        return asyncio.run_coroutine_threadsafe(self._answer(request), self.loop)

    async def _answer(self, request) -> Sample:
        with self.clock:
            for _ in range(len(self.servers) + 2):            # a request that brings servers down ends here
                server = await self._server()
                try:
                    return await self._ask(server, request)
                except _down() as e:
                    self._leave_out(server, e)
            raise ConnectionError(f"model server: {self.role} request failed on {server.url}: {server.fault}")

    async def _server(self) -> Server:
        """The live server with the least to do; waits for one where there is none."""
        give_up = time.monotonic() + self.patience
        while not (live := [s for s in self.servers if s.live]):
            if time.monotonic() > give_up:
                faults = "; ".join(f"{s.url}: {s.fault}" for s in self.servers)
                raise ConnectionError(f"model server: none answers for the {self.role}: {faults}")
            await asyncio.sleep(0.05)
        return min(live, key=lambda s: s.busy)

    async def _ask(self, server: Server, q) -> Sample:
        import openai
        ids, size = self.policy.encode(q.system, q.user, q.png)
        turns = [("user", [image_url(q.png), plain(q.user)])]
        if q.system:
            turns.insert(0, ("system", [plain(q.system)]))
        server.busy += 1
        try:
            reply = await server.client.chat.completions.create(
                model=self.adapter, messages=messages_of("chat", turns), temperature=q.temperature, top_p=1.0,
                seed=q.seed, max_tokens=q.max_new_tokens, logprobs=True, top_logprobs=0, extra_body={
                    "return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
                    "bad_words": self.banned, "stop_token_ids": self.policy.inputs.stop_ids})
        except openai.BadRequestError as e:
            raise UserError(f"server {server.url} refused a request of the {self.role}: {e}") from e
        finally:
            server.busy -= 1
        return self._checked(server, q, ids, size, reply)

    def _checked(self, server: Server, q, ids, size, reply) -> Sample:
        """The reply as a Sample, if it can be trained on. ConnectionError where the server broke it off."""
        choice = reply.choices[0]
        if choice.finish_reason not in ("stop", "length"):
            raise ConnectionError(f"its answer ended with {choice.finish_reason!r}")
        read, written = getattr(reply, "prompt_token_ids", None), getattr(choice, "token_ids", None)
        logp = [token.logprob for token in choice.logprobs.content] if choice.logprobs else []
        wrong = None
        if read is None or not written:
            wrong = "it returns no token ids; vLLM 0.10.2 or newer does"
        elif read != ids:
            wrong = (f"it read {len(read)} prompt ids that are not our {len(ids)}; it must serve the "
                     f"checkpoint, chat template and image-processor settings of --{self.role}")
        elif len(logp) != len(written):
            wrong = f"{len(written)} ids came with {len(logp)} log-probs"
        elif bad := set(written) & set(self.policy.inputs.banned):
            wrong = f"it sampled the ids {sorted(bad)}, which were banned as bad_words"
        if wrong:
            raise UserError(f"server {server.url} of the {self.role}: {wrong}")
        return self.policy.read(q, ids, size, written, logp if q.temperature else [0.0] * len(logp))

    # ----------------------------------------------------------------------------------------------- adapters
    def push(self, version: int) -> dict:
        """Generate with the policy's adapter of now, under a new name, on all servers that answer. Returns
        version, number of servers and the probe's mean |Δ log π| between them and the trainer."""
        name, mismatch = f"{self.role}-{version:06d}-{uuid.uuid4().hex[:8]}", 0.0
        self.adapter = name = gather_objects(name, self.world)[0]
        if self.world.main:
            self._publish(name)
            self._wait(self._install_everywhere())
            mismatch = self._probe()
        gather_objects(None, self.world)          # the adapter is there before another rank asks for it
        if not self.world.main:
            self._wait(self._install_everywhere())
        return {"version": version, "servers": sum(s.live for s in self.servers),
                "probe": gather_objects(mismatch, self.world)[0]}

    def _publish(self, name: str) -> None:
        """Save the adapter, complete or not at all; the one before stays, older ones go."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".{name}.tmp"
        self.policy.save(temporary)
        os.replace(temporary, self.directory / name)
        found = sorted(self.directory.glob(f"{self.role}-*"), key=lambda p: p.stat().st_mtime)
        for old in found[:-KEEP]:
            shutil.rmtree(old)

    async def _install_everywhere(self) -> None:
        """All servers get the present adapter, those that are down when they answer again; where none answers
        for a while, that ends the run."""
        await asyncio.gather(*(self._install(s) for s in self.servers if not s.being_revived))
        try:
            await self._server()
        except ConnectionError as e:
            raise UserError(f"{e}; start a server (model/engine.py says how), then the same command "
                            f"again") from e

    async def _install(self, server: Server) -> None:
        import openai
        try:
            await server.install(self.adapter, self.directory)
            server.live = True
        except (openai.APIConnectionError, openai.InternalServerError) as e:
            self._leave_out(server, e)
        except openai.APIStatusError as e:
            raise UserError(f"server {server.url} refused the adapter {self.adapter}: {e}; it must see "
                            f"{self.directory} and be started as model/engine.py says") from e

    def _leave_out(self, server: Server, error: Exception) -> None:
        """Until it answers again and has the present adapter."""
        server.live, server.fault = False, f"{type(error).__name__}: {error}"
        if not server.being_revived:
            server.reviving = self.loop.create_task(self._revive(server))

    async def _revive(self, server: Server) -> None:
        import openai
        while not server.live:
            await asyncio.sleep(RETRY)
            name = self.adapter
            try:
                await server.install(name, self.directory)
                server.live = name == self.adapter            # a newer one may have come meanwhile
            except openai.APIError as e:
                server.fault = f"{type(e).__name__}: {e}"

    def _probe(self) -> float:
        """Mean |Δ log π| of a fixed prompt's answer between each server and the trainer; too much is an
        error: the server does not sample from the adapter, or not from this base."""
        q = SimpleNamespace(system="Describe the screenshot.", user="What is on this page?", png=_page(),
                            seed=1, temperature=1.0, max_new_tokens=32)
        live, worst = [s for s in self.servers if s.live], 0.0
        for server in live:
            try:
                sample = self._wait(self._ask(server, q))
            except _down() as e:
                self.loop.call_soon_threadsafe(self._leave_out, server, e)
                continue
            logp, = self.policy.logp([sample], q.temperature)
            delta = float((logp.detach().cpu() - torch.tensor(sample.logp)).abs().mean())
            if delta > self.cfg.probe_limit:
                raise UserError(f"server {server.url} of the {self.role}: log-probs of the probe are "
                                f"{delta:.3g} from the trainer's on average (--probe_limit "
                                f"{self.cfg.probe_limit}); does it serve this checkpoint, with "
                                f"--logprobs-mode processed_logprobs?")
            worst = max(worst, delta)
        return worst

    def close(self) -> None:
        async def end():
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            self.loop.call_later(0.1, self.loop.stop)         # when they have noticed
        asyncio.run_coroutine_threadsafe(end(), self.loop)


def _down() -> tuple:
    """The errors of a server that is gone, starting, ending, or has lost the adapter: others may answer."""
    import openai
    return ConnectionError, openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError


def _page() -> bytes:
    """A screenshot of four colours, PNG."""
    image, out = Image.new("RGB", (56, 56), "navy"), io.BytesIO()
    for box, colour in (((28, 0, 56, 28), "white"), ((0, 28, 28, 56), "red"), ((28, 28, 56, 56), "green")):
        image.paste(colour, box)
    image.save(out, "PNG")
    return out.getvalue()
