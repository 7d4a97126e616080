"""A teacher on a vLLM server, through completions with the prompt's log-probs.

``POST {url}/completions`` with ``prompt_logprobs=0`` returns the log-prob of each token of the
prompt, at temperature 1, whatever the server's sampling parameters. Tokens are sent as ids, and the
reply is read by these ids, so a server with a different tokenizer is detected.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlmath.cluster.watchdog import WatchedComponent
from rlmath.errors import UserError
from rlmath.rewards.http_json import CallFailed, Endpoint, post_json
from rlmath.rollout.teacher import LogProbs, TeacherError, ToScore

# The server's key, if it requires one, as for OpenAI's clients.
KEY_VARIABLE = "OPENAI_API_KEY"
PROBE_TIMEOUT_S = 20.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_MAX_REPLY_MIB = 256


class ServerTeacher:
    """A teacher on a server.

    Args:
        url: Base address, such as ``http://host:8000/v1``.
        model: Name on the server; ``None``: its only model.
        sequence_tokens: Maximum sequence length, including the token that the server samples.
        connections: Number of sequences scored concurrently.
        timeout_s: Timeout of an attempt.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        sequence_tokens: int,
        connections: int,
        timeout_s: float,
        attempts: int,
    ) -> None:
        self._url = url.rstrip("/")
        self._completions = Endpoint.parse(f"{self._url}/completions")
        self._model, self._sequence_tokens = model, sequence_tokens
        self._timeout_s, self._attempts = timeout_s, attempts
        self._lock = threading.Lock()
        self._calls = 0
        self._waiting: dict[str, int] = {}
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="teacher")

    def probe(self) -> None:
        """Ask the server for its models (see ``Teacher.probe``)."""
        models = self._models()
        names = [str(one.get("id")) for one in models]
        if self._model is None and len(names) == 1:
            self._model = names[0]
        if self._model not in names:
            what = f"teacher.served_model={self._model}" if self._model else "teacher.served_model"
            raise UserError(
                f"{what}: {self._url} has {', '.join(names) or 'none'}; give one of them"
            )
        longest = models[names.index(self._model)].get("max_model_len")
        if isinstance(longest, int) and longest < self._sequence_tokens:
            raise UserError(
                f"teacher.url={self._url}: {self._model} takes {longest} tokens there, and prompt, "
                f"response and the token that vLLM samples after them make {self._sequence_tokens} "
                "(data.max_prompt_tokens + rollout.max_response_tokens + 1); start it with "
                f"--max-model-len {self._sequence_tokens}, or shorten them"
            )

    def submit(self, sequence: ToScore) -> Future[LogProbs]:
        return self._threads.submit(self._score, sequence)

    def close(self) -> None:
        """Stop without waiting for the server's computation."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def watchdog_probe(self) -> WatchedComponent:

        def waiting_on() -> list[str]:
            with self._lock:
                waiting = list(self._waiting.items())
            return [f"sample {name} at {self._url}, attempt {n}" for name, n in waiting[:10]]

        return WatchedComponent(lambda: self._calls, waiting_on)

    def _models(self) -> list[dict[str, Any]]:
        request = urllib.request.Request(f"{self._url}/models", headers=_headers())
        try:
            with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as reply:
                found = json.load(reply)
            return [dict(one) for one in found["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"teacher.url={self._url}: {self._url}/models returned no list of models "
                f"({error}); give the address of a running vLLM server, with its /v1"
            ) from error

    def _score(self, sequence: ToScore) -> LogProbs:
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, self._attempts + 1):
            with self._lock:
                self._waiting[sequence.name] = attempt
            try:
                return self._ask(sequence)
            except CallFailed as error:
                if not error.retry or attempt == self._attempts:
                    raise TeacherError(
                        f"sample {sequence.name} was not scored in {attempt} of "
                        f"teacher.attempts={self._attempts} attempts: {error}",
                        raised=not error.retry,
                    ) from error
                if self._closed.wait(max(wait_s, error.retry_after_s)):
                    raise TeacherError(f"sample {sequence.name}: the run has ended") from error
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            finally:
                with self._lock:
                    self._calls += 1
                    self._waiting.pop(sequence.name, None)
        raise AssertionError("unreachable")

    def _ask(self, sequence: ToScore) -> LogProbs:
        prompt = list(sequence.prompt_token_ids)
        token_ids = prompt + sequence.sample.token_ids.tolist()
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        reply = post_json(
            self._completions,
            body,
            timeout_s=self._timeout_s,
            headers=_headers(),
            max_reply_mib=_MAX_REPLY_MIB,
        )
        try:
            return read_log_probs(reply, token_ids, len(prompt))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CallFailed(
                f"{self._completions.url}: prompt_logprobs do not match the tokens that were "
                f"sent ({type(error).__name__}: {error})",
                retry=False,
            ) from error


def read_log_probs(reply: Any, token_ids: Sequence[int], prompt_tokens: int) -> LogProbs:
    """Float32 log-probs of all tokens except the prompt's, from a server's reply.

    Args:
        reply: Reply of ``/v1/completions``; its ``prompt_logprobs`` has an entry per token, the
            first of them null, the others with the log-prob by token id.
        token_ids: The ids that were sent.
        prompt_tokens: Number of them in the problem's prompt.

    Raises:
        KeyError, IndexError, TypeError, ValueError: The reply has a different form.
    """
    (choice,) = reply["choices"]
    entries = choice["prompt_logprobs"]
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    scored = range(prompt_tokens, len(token_ids))
    return np.array([entries[i][str(token_ids[i])]["logprob"] for i in scored], np.float32)


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
