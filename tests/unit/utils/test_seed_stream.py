"""Seeds that can be entered at any place of their sequence."""

from hypothesis import given
from hypothesis import strategies as st

from rlmath.utils.seed_stream import SeedStream, SeedStreams, skip


def first(seed, count):
    stream = SeedStream(seed)
    return [stream.next() for _ in range(count)]


def test_the_numbers_are_those_of_splitmix64():
    """A seed that mixes to 0 gives the generator's published first outputs for seed 0."""
    assert first(0, 3) == [
        0xE220A8397B1DCDAF >> 1,
        0x6E789E6AA1B965F4 >> 1,
        0x06C45D188009454F >> 1,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(0, 60), st.integers(0, 60))
def test_seed_stream_resumes_where_another_ended(seed, begun, more):
    later = skip(seed, begun)
    assert 0 <= later < 2**64
    assert first(later, 5) == first(seed, begun + 5)[begun:]
    assert skip(later, more) == skip(seed, begun + more)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8), st.integers(0, 20))
def test_streams_side_by_side_are_the_same_streams(seeds, count):
    streams = [SeedStream(seed) for seed in seeds]
    before = [one.next() for one in streams]
    together = SeedStreams(streams)
    rows = [together.next().tolist() for _ in range(count)]
    together.put_back()
    after = [one.next() for one in streams]
    found = [list(one) for one in zip(before, *rows, after, strict=True)]
    assert found == [first(seed, count + 2) for seed in seeds]
