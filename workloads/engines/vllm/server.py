"""A vLLM server that somebody started, over HTTP.

It must have been started with `--worker-extension-cls workloads.engines.vllm.worker.AuditExtension`, this project's
folder on PYTHONPATH and VLLM_SERVER_DEV_MODE=1. The server belongs to who started it: nothing here ends it.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from workloads.engines.protocol import Generation, Prompt
from workloads.engines.vllm.offline import EXTENSION
from workloads.spec import GangSpec, Sampling

TOKEN = "token_id:"  # how the server spells tokens when it is asked for their ids


_HINTS = {
    404: "Start the server with VLLM_SERVER_DEV_MODE=1.",
    500: f"Its log says why; it must have been started with --worker-extension-cls {EXTENSION}.",
}


class ServerError(RuntimeError):
    """The server cannot be reached, or refused a request."""


class ServerEngine:
    """All replicas of one server, which passes calls on to each of them. Raises ServerError."""

    def __init__(self, spec: GangSpec) -> None:
        assert spec.backend.url is not None, "attaching needs backend.url"
        self._url = urlsplit(spec.backend.url)
        self._timeout_s = spec.collective_timeout_s
        self._concurrency, self._replicas = spec.backend.max_requests, spec.parallelism.dp
        [self._model, *_] = self._json("GET", "/v1/models")["data"]
        ranks = self._json("GET", "/get_world_size?include_dp=true")["world_size"]
        if ranks != spec.parallelism.ranks:
            raise ServerError(
                f"The server of {self._url.geturl()} has {ranks} workers, the layout {spec.parallelism.ranks} ranks: "
                "set parallelism.tp and parallelism.dp to what the server was started with."
            )

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method on every worker. The results are those of the first replica: a server returns no others."""
        answer = self._json("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"])

    def served(self) -> str:
        return str(self._model["root"])

    def generate(self, prompts: Sequence[Prompt], params: Sampling, stop: frozenset[int]) -> list[Generation]:
        """Continues every prompt, prompt i on replica i mod dp, and no more of one replica at a time than asked: what
        is computed together decides the last bits of the answers."""
        with ExitStack() as stack:
            threads = [
                stack.enter_context(ThreadPoolExecutor(self._concurrency)) for _ in range(self._replicas)
            ]
            answers = [
                threads[number % self._replicas].submit(
                    self._complete, prompt, params, stop, number % self._replicas
                )
                for number, prompt in enumerate(prompts)
            ]
            return [answer.result() for answer in answers]

    def reset_caches(self) -> None:
        self._json("POST", "/reset_prefix_cache")

    def sleep(self, level: int) -> None:
        self._json("POST", f"/sleep?level={level}")

    def wake(self) -> None:
        self._json("POST", "/wake_up")

    def kv_capacity_tokens(self) -> int:
        """Of one replica."""
        with self._open("GET", "/metrics") as response:
            lines = response.read().decode().splitlines()
        line = next(line for line in lines if line.startswith("vllm:cache_config_info{"))
        return _label(line, "num_gpu_blocks") * _label(line, "block_size")

    def close(self) -> None:
        """The server goes on."""

    def _complete(self, prompt: Prompt, params: Sampling, stop: frozenset[int], replica: int) -> Generation:
        asked = {
            "model": self._model["id"],
            "prompt": list(prompt.token_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "logprobs": params.top_logprobs,
            "stop_token_ids": sorted(stop),
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        generation = Generation(id=prompt.id, prompt_tokens=len(prompt.token_ids))
        started = time.perf_counter()
        chosen = {"X-data-parallel-rank": str(replica)} if self._replicas > 1 else {}
        with self._open("POST", "/v1/completions", asked, chosen) as response:
            for choice in _choices(response):
                _extend(generation, choice, params.top_logprobs)
                if not generation.first_token_s:
                    generation.first_token_s = time.perf_counter() - started
        generation.total_s = time.perf_counter() - started
        return generation

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._open(method, path, body) as response:
            data = response.read()
        return json.loads(data) if data else {}

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> "_Response":
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=self._timeout_s)
        text = None if body is None else json.dumps(body)
        where = f"{method} {self._url.geturl().rstrip('/')}{path}"
        try:
            kinds = {"Content-Type": "application/json", **headers}
            connection.request(method, self._url.path.rstrip("/") + path, text, kinds)
            answer = connection.getresponse()
        except OSError as error:
            connection.close()
            raise ServerError(
                f"{where} failed: {error}. Is the server of backend.url up and reachable from this node?"
            ) from error
        if answer.status != 200:
            said = answer.read(2000).decode(errors="replace")
            connection.close()
            raise ServerError(
                f"{where} was answered with {answer.status} {answer.reason}: {said} {_HINTS.get(answer.status, '')}"
            )
        return _Response(connection, answer)


@dataclass
class _Response:
    """An answer whose connection is closed with it."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse

    def __enter__(self) -> http.client.HTTPResponse:
        return self.answer

    def __exit__(self, *exception: object) -> None:
        self.connection.close()


def _choices(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Parts of one streamed completion, as server-sent events."""
    for line in response:
        text = line.decode().strip()
        if not text.startswith("data:") or text == "data: [DONE]":
            continue
        event = json.loads(text.removeprefix("data:"))
        if "error" in event:
            raise ServerError(f"The server ended a completion with {event['error']}.")
        yield from event["choices"]


def _extend(generation: Generation, choice: Mapping[str, Any], count: int) -> None:
    logprobs = choice.get("logprobs")
    if logprobs:
        generation.token_ids += [_id(token) for token in logprobs["tokens"]]
        for candidates in logprobs["top_logprobs"]:
            ranked = sorted(((_id(token), value) for token, value in candidates.items()), key=_rank)
            generation.top_logprobs.append(ranked[:count])
    if choice.get("finish_reason"):
        generation.finish_reason = choice["finish_reason"]


def _rank(candidate: tuple[int, float]) -> tuple[float, int]:
    return -candidate[1], candidate[0]


def _id(token: str) -> int:
    return int(token.removeprefix(TOKEN))


def _label(line: str, name: str) -> int:
    return int(line.split(f'{name}="', 1)[1].split('"', 1)[0])
