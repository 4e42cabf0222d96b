"""Steps of a scenario as calls of vLLM's public entry points; observations as calls of the extension in its workers."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from workloads import heartbeat
from workloads.engines.protocol import Generation, Prompt, Tokenizer, UnsupportedError, UpdateStats
from workloads.engines.tokenizer import make_tokenizer
from workloads.engines.vllm import offline, saved
from workloads.engines.vllm.drafts import drafts_inside
from workloads.engines.vllm.replicas import Replicas
from workloads.engines.vllm.sources import TREE, digest
from workloads.loading.shards import read_config
from workloads.spec import WHOLE, Arrival, GangSpec, Sampling

IMPORTED = digest()
TRANSFER_CHUNK = 64  # tensors of one message of a weight transfer


class EngineError(RuntimeError):
    """The engine answered, and the answer is wrong."""


class Connection(Protocol):
    """One replica of vLLM, started by us or found running."""

    def rpc(self, method: str, **arguments: Any) -> list[Any]: ...
    def served(self) -> str: ...
    def generate(
        self, prompts: Sequence[Prompt], params: Sampling, stop: frozenset[int]
    ) -> list[Generation]: ...
    def reset_caches(self) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake(self) -> None: ...
    def kv_capacity_tokens(self) -> int: ...
    def close(self) -> None: ...


class VllmEngine:
    """One replica of the engine. `workers` observes it from inside its worker processes."""

    def __init__(self, spec: GangSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self._replicas = Replicas(spec, rank)
        self._connection: Connection | None = None
        self._updates_left = sum(step.do == "update" for step in spec.steps)
        folder = self._folder(spec.steps[0].checkpoint)
        tokenizer = make_tokenizer(spec.model.tokenizer, _vocabulary(folder), folder)
        self.tokenizer: Tokenizer = tokenizer
        self._stop = tokenizer.eos_ids
        self.workers = Workers(self)

    # Weights -----------------------------------------------------------------------------------------

    def start(self, checkpoint: str, via: str) -> UpdateStats:
        """Starts an engine, or attaches to a running one.

        Raises EngineError when the engine serves another model than it was asked for, or its workers are not ours
        to observe.
        """
        started = time.perf_counter()
        folder = self._folder(checkpoint)
        if via == "attach":
            from workloads.engines.vllm.server import ServerEngine

            self._connection = ServerEngine(self.spec)
        elif via in offline.STARTS:
            draft = self.spec.checkpoints[checkpoint].draft
            apart = self._folder(draft) if draft else None
            self._connection = offline.OfflineEngine(self.spec, folder, via, apart)
        else:
            raise UnsupportedError(f"This adapter cannot start vLLM via {via!r}.")
        asked = Path(self.spec.saved_dir) if via == saved.SHARDED else folder
        served = self.connection.served()
        if Path(served).resolve() != asked.resolve():
            raise EngineError(
                f"The engine serves {served}, but checkpoint {checkpoint!r} is {asked}: start it on that folder, or "
                "name the checkpoint that it serves."
            )
        self.workers.prepare()
        return UpdateStats(install_s=time.perf_counter() - started, nbytes=_bytes(folder))

    def update(self, checkpoint: str, via: str, arrival: Arrival = WHOLE) -> UpdateStats:
        """Replaces the weights that serve. What was computed with the old ones is forgotten, as vLLM leaves to its
        caller. A draft is replaced by transfer only: vLLM has no other way."""
        if arrival != WHOLE:
            raise UnsupportedError(
                f"This adapter updates vLLM as a whole, in vLLM's own order, not by {arrival}."
            )
        folder, draft = self._folder(checkpoint), self._draft(checkpoint)
        started = time.perf_counter()
        match via:
            case "reload":
                # After a start without files the loader would make random weights again.
                self.connection.rpc("update_config", overrides={"load_config": {"load_format": "auto"}})
                self.connection.rpc("reload_weights", weights_path=str(folder))
            case "iterator":
                self.connection.rpc("refit_iterate", folder=str(folder))
            case "transfer":
                self._transfer(folder, "start_weight_update")
                if draft is not None:
                    self._transfer(draft, "start_draft_weight_update")
            case _:
                raise UnsupportedError(f"This adapter cannot update vLLM via {via!r}.")
        installed = time.perf_counter()
        self._updates_left -= 1
        if not self._updates_left:  # a later load would repair the harm, or trip over it
            self.workers.inject(self.spec.faults)
        self.connection.reset_caches()
        return UpdateStats(
            install_s=installed - started,
            finish_s=time.perf_counter() - installed,
            nbytes=_bytes(folder),
        )

    def _transfer(self, folder: Path, session: str) -> None:
        rpc = self.connection.rpc
        names = rpc("refit_names", folder=str(folder))[0]
        rpc("init_weight_transfer_engine", init_info={})
        rpc(session)
        for start in range(0, len(names), TRANSFER_CHUNK):
            chunk = {"folder": str(folder), "names": names[start : start + TRANSFER_CHUNK]}
            rpc("update_weights", update_info=chunk)
            heartbeat.advance()
        rpc("finish_weight_update")

    def save(self, checkpoint: str, via: str) -> None:
        """Writes what a start via `via` reads, in the engine's own ways, to the folder that the specification names."""
        if self.rank:
            return  # replicas hold the same
        folder = self._folder(checkpoint)
        saved.make_folder(self.spec, folder)
        if via == saved.SHARDED:
            self.connection.rpc("save_sharded_state", path=self.spec.saved_dir)
        else:
            file = saved.tensors_uri(self.spec)
            self.connection.rpc("refit_save", via=via, checkpoint=str(folder), file=file)

    def sleep(self, level: int) -> None:
        self.connection.sleep(level)

    def wake(self) -> None:
        self.connection.wake()

    # Serving -----------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], params: Sampling) -> list[Generation]:
        """Continues every prompt; prompt i runs on replica i mod dp, and replica 0 returns all."""
        mine = self._replicas.share(prompts)
        done = self.connection.generate(mine, params, self._stop) if mine else []
        return self._replicas.collect(done, len(prompts))

    def kv_capacity_tokens(self) -> int:
        return self.connection.kv_capacity_tokens() * self.spec.parallelism.dp

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._replicas.leave()

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("This engine was not started yet: call start first.")
        return self._connection

    def _draft(self, checkpoint: str) -> Path | None:
        """Folder with the weights of the drafter, which is the target's where it brings its own; None without one."""
        draft = self.spec.checkpoints[checkpoint].draft
        if not draft and not drafts_inside(self.spec.backend):
            return None
        return self._folder(draft or checkpoint)

    def _folder(self, checkpoint: str) -> Path:
        return Path(self.spec.checkpoint_dirs[checkpoint])


class Workers:
    """The `Observer` of a replica: each call goes to the extension in every worker, which writes its rank's records."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def prepare(self) -> None:
        """Tells every worker which rank it is. Raises EngineError when one is missing or runs other code.

        A server with several replicas answers for its first one only; of the others the record files tell.
        """
        spec = self._engine.spec
        gang_file = str(Path(spec.output) / "gang.json")
        answers = self._rpc("refit_prepare", gang_file=gang_file, first_rank=self._engine.rank)
        own = str(Path(__file__).with_name("worker.py"))
        foreign = sorted({answer["source"] for answer in answers} - {own})
        if foreign:
            raise EngineError(
                f"Workers import the audit extension from {foreign[0]}, this run's is {own}: another installation of "
                "this project comes first on the path of the engine."
            )
        if any(answer["imported"] != IMPORTED for answer in answers):
            what = "this command" if spec.backend.url is None else "the server"
            raise EngineError(
                f"Workers run another version of the files below {TREE}: they were changed after an import. "
                f"Start {what} again."
            )
        led = list(range(self._engine.rank, self._engine.rank + spec.parallelism.tp))
        ranks = sorted(answer["rank"] for answer in answers)
        if ranks != led:
            raise EngineError(
                f"Workers of ranks {ranks} answered, the layout has {led}: the engine runs another layout."
            )

    def inject(self, faults: Sequence[str]) -> None:
        """Does the harm that the specification asks for, on the last rank only: no other may be blamed."""
        for fault in faults:
            self._rpc("refit_inject", fault=fault, rank=self._engine.spec.parallelism.ranks - 1)

    def tensors(self, observation: str, checkpoint: str) -> None:
        self._rpc("refit_tensors", observation=observation, checkpoint=checkpoint)

    def memory(self, observation: str) -> None:
        self._rpc("refit_memory", observation=observation)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        self._rpc("refit_trace", on=True)
        try:
            yield
        finally:
            self._rpc("refit_trace", on=False)

    def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        return self._engine.connection.rpc(method, **arguments)


def _vocabulary(folder: Path) -> int:
    config = read_config(folder)
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0))


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
