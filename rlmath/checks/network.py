"""Whether what a run reaches over the network answers: reward servers, a teacher's,
the folder that the run is mirrored to, and the hub."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rlmath.checks.mirror import remote_problems
from rlmath.config.benchmarks import benchmarks_of
from rlmath.config.hub_names import is_hub, parts_of
from rlmath.config.schema import Config
from rlmath.model import hub
from rlmath.model.published import KNOWN, VERSIONS, hub_address
from rlmath.rewards.http_json import Endpoint, unreachable
from rlmath.utils.close_names import did_you_mean


@dataclass
class Answers:
    """Servers and names that do not answer: ``problems``, with which the run would end at its
    start, and ``warnings``."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def ask(config: Config, command: str, *, elsewhere: bool, ask_hub: bool) -> Answers:
    """Connect to the servers of checked settings, and ask the hub for what is named there."""
    answers = Answers()
    if command != "sft":
        with ThreadPoolExecutor() as pool:
            for key, cure, failures, count in pool.map(_connect, _servers(config, command)):
                ends_run = len(failures) == count and not elsewhere
                where = " from this machine" if elsewhere else ""
                text = f"{key}: no answer{where} from {'; '.join(failures)}; {cure}"
                if failures:
                    (answers.problems if ends_run else answers.warnings).append(text)
    (answers.warnings if elsewhere else answers.problems).extend(remote_problems(config, command))
    try:
        answers.problems += _hub(config, command) if ask_hub else []
    except hub.HubUnreachable as error:
        answers.warnings.append(f"the hub cannot be asked for models and data from here ({error})")
    return answers


def _servers(config: Config, command: str) -> Iterator[tuple[str, str, list[Endpoint]]]:
    """Setting, fix and addresses, one of which has to answer."""
    for index, item in enumerate(config.reward.items):
        key = f"reward.items[{index}].name={item.name}"
        given = item.name
        if item.name == "remote":
            key, given = f"reward.items[{index}].params.urls", item.params.get("urls", "")
        elif not item.name.startswith(("http://", "https://")):
            continue
        urls = given.split(",") if isinstance(given, str) else list(given)
        yield key, "start the reward server, or correct its address", [*_endpoints(urls)]
    if command == "train" and config.algorithm.distill_coef and config.teacher.url is not None:
        cure = "start the teacher's server, or correct its address"
        yield f"teacher.url={config.teacher.url}", cure, [*_endpoints([config.teacher.url])]


def _endpoints(urls: list[str]) -> Iterator[Endpoint]:
    for url in urls:
        try:
            yield Endpoint.parse(url)
        except ValueError:
            continue  # The rewards report it.


def _connect(server: tuple[str, str, list[Endpoint]]) -> tuple[str, str, list[str], int]:
    key, cure, endpoints = server
    failures = [
        f"{one.host}:{one.port_number} ({reason})"
        for one in endpoints
        if (reason := unreachable(one))
    ]
    return key, cure, failures, len(endpoints)


def _hub(config: Config, command: str) -> Iterator[str]:
    """Errors in names of the hub. Raises HubUnreachable: it cannot be asked."""
    name = config.model.path
    if hub.is_hub_model(name) and hub.cached_model(name) is None and (said := hub.refusal(name)):
        known = [address for key in (*KNOWN, *VERSIONS) if (address := hub_address(key))]
        yield f"model.path={name}: {said}{did_you_mean(name, known, cutoff=0.8)}"
    paths = config.sft.train_paths if command == "sft" else config.data.train_paths
    if command == "evaluate":
        paths = []
    if command != "sft":
        paths = [*paths, *(str(path) for one in benchmarks_of(config) for path in one.paths)]
    for path in dict.fromkeys(path for path in paths if is_hub(path)):
        name = parts_of(path)[0]
        if not Path(name).exists() and (said := hub.refusal(name, "dataset")):
            yield f"{path}: {said}"
