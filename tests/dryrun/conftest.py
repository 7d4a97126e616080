"""Ranks of GPU layouts, counted once for all tests, in separate processes."""

import dataclasses
from collections.abc import Callable

import pytest

from benchmarks.dry_run.jobs import Job, RankCount
from benchmarks.dry_run.pool import Pool

Count = Callable[[list[Job]], list[RankCount]]


@pytest.fixture(scope="session")
def count_ranks():
    """Counts jobs, each of which once: presets that are alike differ in their names alone."""
    known = {}

    def key(job):
        return repr(dataclasses.replace(job, name=""))

    with Pool(2) as pool:

        def count(jobs):
            new = list({key(job): job for job in jobs if key(job) not in known}.values())
            known.update({key(one.job): one for one in pool.count(new)})
            return [dataclasses.replace(known[key(job)], job=job) for job in jobs]

        yield count
