"""Divisions: each item once, sizes as promised, and co-membership as Lemma 2 says."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import randombatch as rb
from randombatch import Division, fold_in, random_batch_attention
from randombatch.permutation import SORTED_BELOW


def batches(division: Division) -> list[tuple[int, ...]]:
    """The batches by `order` and `sizes` alone."""
    parts = division.order().split(list(division.sizes)) if division.sizes else []
    return [tuple(part.tolist()) for part in parts]


def check(division: Division, max_items: int) -> None:
    n = division.num_items
    order = division.order()
    assert torch.equal(order.sort().values, torch.arange(n))
    assert torch.equal(division.position(order), torch.arange(n))
    number = torch.repeat_interleave(torch.arange(division.num_batches), torch.tensor(division.sizes, dtype=torch.long))
    assert torch.equal(division.batch_of(order), number)
    from_blocks = [tuple(batch) for block in division.blocks(max_items) for batch in block.tolist()]
    assert sorted(from_blocks) == sorted(batches(division))
    for block in division.blocks(max_items):
        assert block.numel() <= max_items or len(block) == 1


@settings(deadline=None, max_examples=60)
@given(
    n=st.one_of(st.integers(0, 300), st.sampled_from([SORTED_BELOW, SORTED_BELOW + 1, 70_001])),
    p=st.integers(2, 130),
    seed=st.integers(-(2**70), 2**70),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_properties(n: int, p: int, seed: int, cut: tuple[float, float]) -> None:
    division = Division(n, p, seed)
    assert division.num_batches == math.ceil(n / p)
    assert sum(division.sizes) == n
    assert list(division.sizes) == sorted(division.sizes, reverse=True)
    assert not division.sizes or division.sizes[0] - division.sizes[-1] <= 1
    check(division, max_items=100)
    start, stop = sorted(int(c * n) for c in cut)
    assert torch.equal(division.order(start, stop), division.order()[start:stop])


@settings(deadline=None, max_examples=60)
@given(
    graphs=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([SORTED_BELOW - 1, SORTED_BELOW + 5])), max_size=12),
    p=st.integers(2, 50),
    seed=st.integers(0, 2**63),
)
def test_graphs_are_divided_as_if_alone(graphs: list[int], p: int, seed: int) -> None:
    ptr = torch.tensor([0, *itertools.accumulate(graphs)])
    division = Division(int(ptr[-1]), p, seed, ptr=ptr)
    check(division, max_items=200)
    sizes: list[int] = []
    for g, n in enumerate(graphs):
        alone = Division(n, p, seed)
        sizes += alone.sizes
        assert torch.equal(division.order(int(ptr[g]), int(ptr[g + 1])) - ptr[g], alone.order())
        assert torch.equal(division.position(torch.arange(n) + ptr[g]) - ptr[g], alone.position(torch.arange(n)))
    assert division.sizes == tuple(sizes)
    assert division.num_batches == len(sizes)
    assert torch.equal(division.graph_of(division.order()).sort().values, division.graph_of(torch.arange(int(ptr[-1]))))


@pytest.mark.parametrize(("sizes", "p"), [(range(40), 12), (range(SORTED_BELOW, SORTED_BELOW + 80, 10), 10_000)])
def test_blocks_begin_with_the_largest(sizes: range, p: int) -> None:
    """Buffers for the first then serve most."""
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    widths = [block.shape[1] for block in Division(int(ptr[-1]), p, 3, ptr=ptr).blocks(50)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > 5


def test_the_published_trap_of_a_lonely_last_batch() -> None:
    assert Division(1001, 100, 0).sizes == (91,) * 11
    assert Division(10, 100, 0).sizes == (10,)
    assert Division(1, 1, 0).sizes == (1,)
    assert Division(0, 2, 0).sizes == ()


def test_golden_values() -> None:
    assert Division(12, 5, 42).order().tolist() == [11, 5, 0, 10, 8, 2, 4, 6, 9, 7, 1, 3]
    assert Division(169_343, 64, 42).order(1000, 1006).tolist() == [105356, 82986, 54130, 11051, 88887, 136505]
    ptr = torch.tensor([0, 4, 9])
    assert Division(9, 3, 42, ptr=ptr).order().tolist() == [0, 2, 1, 3, 4, 6, 8, 5, 7]
    torch.manual_seed(0)
    assert rb.Division.draw(10, 3).seed == 900450186894289456


def co_members(n: int, p: int, seeds: range) -> torch.Tensor:
    """How often each two items share a batch, `(n, n)`."""
    counts = torch.zeros(n, n)
    for seed in seeds:
        batch = Division(n, p, fold_in(99, seed)).batch_of(torch.arange(n))
        counts += batch[:, None] == batch
    return counts


@pytest.mark.parametrize(("n", "p"), [(6, 2), (6, 3), (7, 3), (8, 4)])
def test_partitions_of_few_items_are_equally_likely(n: int, p: int) -> None:
    """Chi-square over every possible division: stronger than any pair or triple probability."""
    trials = 12_000
    seen: dict[tuple, int] = {}
    for seed in range(trials):
        key = tuple(sorted(tuple(sorted(b)) for b in batches(Division(n, p, seed))))
        seen[key] = seen.get(key, 0) + 1
    sizes = Division(n, p, 0).sizes
    possible = math.factorial(n)
    for s in sizes:
        possible //= math.factorial(s)
    for s in set(sizes):
        possible //= math.factorial(sizes.count(s))
    assert len(seen) == possible
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


@pytest.mark.parametrize(("n", "p"), [(10, 5), (12, 4), (9, 3)])
def test_pairs_share_a_batch_as_lemma_2_says(n: int, p: int) -> None:
    trials = 20_000
    pair = (p - 1) / (n - 1)
    counts = co_members(n, p, range(trials))
    expected = trials * pair
    off = counts[~torch.eye(n, dtype=torch.bool)]
    assert (off - expected).abs().max() < 5 * math.sqrt(expected * (1 - pair))


@pytest.mark.parametrize(("n", "p"), [(1000, 10), (1003, 10), (SORTED_BELOW + 1, 16)])
def test_co_membership_by_monte_carlo(n: int, p: int) -> None:
    """P(j in C_i) = sum over batches of s (s - 1) / (n (n - 1)), which is (p - 1)/(n - 1) where p divides n."""
    sizes = torch.tensor(Division(n, p, 0).sizes, dtype=torch.float64)
    pair = float((sizes * (sizes - 1)).sum()) / (n * (n - 1))
    triple = float((sizes * (sizes - 1) * (sizes - 2)).sum()) / (n * (n - 1) * (n - 2))
    trials, distances = 1500, (1, 2, 7, 32, 64, 500)
    hits, triples = torch.zeros(len(distances)), 0
    for seed in range(trials):
        batch = Division(n, p, fold_in(17, seed)).batch_of(torch.arange(n))
        rolled = [batch.roll(d) == batch for d in distances]
        hits += torch.tensor([float(r.sum()) for r in rolled])
        triples += int((rolled[0] & rolled[2]).sum())
    for count in hits:
        assert abs(count - trials * n * pair) < 5 * math.sqrt(trials * n * pair)
    assert abs(triples - trials * n * triple) < 5 * math.sqrt(trials * n * triple)
    if n % p == 0:
        assert pair == pytest.approx((p - 1) / (n - 1))


@pytest.mark.parametrize("n", [1000, SORTED_BELOW + 9])
def test_steps_layers_and_seeds_are_independent(n: int) -> None:
    """Two divisions of different (seed, step, layer) share pairs as often as chance has it."""
    p, trials = 10, 400
    pair = (p - 1) / (n - 1)
    for a, b in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((3, 4), (4, 3))]:
        both = 0
        for seed in range(trials):
            one = Division(n, p, fold_in(seed, *a)).batch_of(torch.arange(n))
            two = Division(n, p, fold_in(seed, *b)).batch_of(torch.arange(n))
            both += sum(int(((one.roll(d) == one) & (two.roll(d) == two)).sum()) for d in range(1, 30))
        expected = trials * n * 29 * pair**2
        assert abs(both - expected) < 5 * math.sqrt(expected) + 1


def test_consecutive_seeds_are_independent() -> None:
    n, p = 500, 10
    both = 0
    for seed in range(400):
        one, two = (Division(n, p, s).batch_of(torch.arange(n)) for s in (seed, seed + 1))
        both += int(((one[:, None] == one) & (two[:, None] == two)).sum()) - n
    expected = 400 * n * (p - 1) ** 2 / (n - 1)
    assert abs(both - expected) < 5 * math.sqrt(2 * expected)


def test_the_average_over_divisions_is_the_full_mean() -> None:
    """Unbiased for sizes that differ: the mean over the other members of i's batch, averaged over divisions."""
    n, p, trials = 7, 3, 40_000
    y = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, -2.0])
    means = torch.empty(trials, n)
    for seed in range(trials):
        batch = Division(n, p, fold_in(23, seed)).batch_of(torch.arange(n))
        mates = (batch[:, None] == batch).float().fill_diagonal_(0)
        means[seed] = mates @ y / mates.sum(1)
    full = (y.sum() - y) / (n - 1)
    assert ((means.mean(0) - full).abs() < 5 * means.std(0) / math.sqrt(trials)).all()


def test_on_rows_follows_the_items() -> None:
    ids = torch.randperm(50)
    division = Division(50, 7, 3)
    moved = division.on_rows(torch.argsort(ids))
    assert torch.equal(ids[moved.order()], division.order())
    assert torch.equal(moved.batch_of(torch.arange(50)), division.batch_of(ids))
    some = division.on_rows(torch.arange(50) * 3 + 1)
    assert torch.equal(some.order(), division.order() * 3 + 1)
    assert torch.equal(some.position(some.order()), torch.arange(50))
    with pytest.raises(ValueError, match="no such item: 2"):
        some.position(torch.tensor([1, 2]))


def test_is_a_value() -> None:
    assert Division(10, 3, 1) == Division(10, 3, 1)
    assert hash(Division(10, 3, 1)) == hash(Division(10, 3, 1))
    assert Division(10, 3, 1) != Division(10, 3, 2)
    assert Division(10, 3, 1) != Division(10, 3, 1, ptr=torch.tensor([0, 4, 10]))
    generator = torch.Generator().manual_seed(5)
    assert Division.draw(10, 3, generator) != Division.draw(10, 3, generator)
    assert Division.draw(10, 3, torch.Generator().manual_seed(5)) == Division.draw(
        10, 3, torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 1, 0), ValueError, "`batch_size` must be at least 2, got 1"),
        ((10, 0, 0), ValueError, "`batch_size` must be at least 2"),
        ((10, 2.0, 0), TypeError, "`batch_size` must be an int"),
        ((10, True, 0), TypeError, "`batch_size` must be an int"),
        ((-1, 2, 0), ValueError, "`num_items` must not be negative"),
        ((2.5, 2, 0), TypeError, "`num_items` must be an int"),
        ((10, 2, 0.5), TypeError, "`seed` must be an int"),
    ],
)
def test_bad_arguments(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Division(*arguments)


@pytest.mark.parametrize("ptr", [[0, 5, 3, 10], [1, 10], [0, 9], [], [0.0, 10.0], [[0, 10]]])
def test_bad_boundaries(ptr: list) -> None:
    with pytest.raises(ValueError, match="`ptr` must"):
        Division(10, 2, 0, ptr=torch.tensor(ptr))


def test_is_not_changed_by_what_happens_to_its_boundaries() -> None:
    ptr = torch.tensor([0, 40, 100])
    division = Division(100, 7, 1, ptr=ptr)
    before = division.order()
    ptr[1] = 20
    assert torch.equal(division.order(), before)


@pytest.mark.parametrize("name", ["num_items", "batch_size", "seed"])
def test_a_value_does_not_change(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Division(10, 3, 0), name, 5)


def test_bad_items_and_rows() -> None:
    with pytest.raises(ValueError, match="no such item: 10"):
        Division(10, 2, 0).position(torch.tensor([3, 10]))
    with pytest.raises(TypeError, match="`items` must be integers"):
        Division(10, 2, 0).batch_of(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="distinct"):
        Division(3, 2, 0).on_rows(torch.tensor([1, 1, 2]))
    with pytest.raises(ValueError, match="is on rows already"):
        Division(3, 2, 0).on_rows(torch.tensor([4, 1, 2])).on_rows(torch.tensor([4, 1, 2]))


def test_what_are_no_integers() -> None:
    division = Division(3, 2, 0)
    with pytest.raises(TypeError, match="`start` and `stop` must be integers or None, got 1.5 and None"):
        division.order(1.5)
    with pytest.raises(TypeError, match="`items` must be a dense tensor"):
        division.position(torch.tensor([0, 1]).to_sparse())
    with pytest.raises(TypeError, match="`ptr` must be a dense tensor"):
        Division(3, 2, 0, ptr=torch.tensor([0, 3]).to_sparse())
    for wrong in (None, "a", torch.tensor([1.5]), torch.tensor([1j]), torch.tensor([True])):
        with pytest.raises(TypeError, match="`items` must be integers"):
            division.position(wrong)
        with pytest.raises(TypeError, match="`rows` must be integers"):
            division.on_rows(wrong)
    assert division.position([]).tolist() == division.batch_of([]).tolist() == []
    with pytest.raises(ValueError, match=r"`num_items` must not be negative and less than 2\*\*62"):
        Division(1 << 62, 2, 0)


def test_owns_its_rows_and_its_seed_has_64_bits() -> None:
    rows = torch.tensor([5, 1, 4])
    division = Division(3, 2, 0).on_rows(rows)
    before = division.order()
    rows[0] = 99
    assert torch.equal(division.order(), before)
    assert Division(10, 2, 1) == Division(10, 2, (1 << 64) + 1)
    assert hash(Division(10, 2, 1)) == hash(Division(10, 2, (1 << 64) + 1))
    assert repr(division) == "Division(3, 2, seed=0).on_rows(...)"


def test_items_stay_where_they_are_under_a_default_device() -> None:
    division = Division(10, 3, 0)
    with torch.device("meta"):
        moved = division.on_rows(torch.arange(10, device="cpu"))
        assert torch.equal(moved.position(torch.arange(10, device="cpu")), division.position(list(range(10))))


def test_what_is_refused_has_drawn_nothing() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="`batch_size` must be at least 2"):
        Division.draw(10, 1)
    with pytest.raises(TypeError, match="`generator` must be a torch.Generator, got int"):
        Division.draw(10, 4, generator=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [101, 5000])
def test_a_division_made_in_inference_mode_serves_training(length: int) -> None:
    ptr = torch.tensor([0, length // 3, length])
    rows = torch.randperm(length)
    with torch.inference_mode():
        divisions = [
            Division(length, 7, 3),
            Division(length, 7, 3, ptr=torch.tensor([0, length // 3, length])),
            Division(length, 7, 3).on_rows(rows + 0),
        ]
        for division in divisions:
            division.order()
    expected = Division(length, 7, 3), Division(length, 7, 3, ptr=ptr), Division(length, 7, 3).on_rows(rows)
    for division, same in zip(divisions, expected, strict=True):
        q = torch.randn(1, length, 4, requires_grad=True)
        out, again = (random_batch_attention(q, q, q, division=d) for d in (division, same))
        assert torch.equal(out, again)
        assert torch.equal(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (out, again)))


def test_positions_in_graphs_cost_what_they_are() -> None:
    """As many items could not be held, nor sorted."""
    n = 1 << 34
    ptr = [0, 5, 5, n, n + 30, 2 * n]
    division = Division(2 * n, 64, 3, ptr=ptr)
    items = torch.tensor([[4, 5, n - 1], [n, n + 29, 2 * n - 1]])
    position = division.position(items)
    for g, (first, stop) in enumerate(itertools.pairwise(ptr)):
        for item in items.flatten().tolist():
            if first <= item < stop:
                place = int(position[items == item])
                assert division.order(place, place + 1).tolist() == [item]
                alone = Division(stop - first, 64, 3).position(torch.tensor(item - first))
                assert place - first == int(alone), g


@pytest.mark.parametrize("n", [100, SORTED_BELOW + 100])
def test_compiled_code_divides_alike(n: int) -> None:
    """torch's compiler by itself makes other numbers of integers that wrap around, and crashes on them as places."""
    torch._dynamo.reset()
    x = torch.randn(n, 3)
    compiled = torch.compile(lambda x: x[Division(n, 16, 5).order(3, 90)], fullgraph=True)
    assert torch.equal(compiled(x), x[Division(n, 16, 5).order(3, 90)])

    def look_up(division: Division, items: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return division.order(), division.position(items), division.batch_of(items)

    compiled, items = torch.compile(look_up), torch.randint(n, (2, 30))
    for division in (
        Division(n, 16, 5),
        Division(n, 16, 6),
        Division(n, 16, 5, ptr=[0, 40, n]),
        Division(n, 16, 5).on_rows(torch.randperm(n)),
    ):
        for ours, truth in zip(compiled(division, items), look_up(division, items), strict=True):
            assert torch.equal(ours, truth)


def test_operators_of_compiled_code() -> None:
    key = Division(100, 16, 5).key
    for bounds in (torch.tensor([0, 100]), torch.tensor([0, 40, 100])):
        torch.library.opcheck(torch.ops.randombatch.order, (key, bounds, 3, 50, None))
        for items in (torch.arange(6).view(2, 3).T, torch.zeros(0, dtype=torch.long)):
            torch.library.opcheck(torch.ops.randombatch.position, (items, key, bounds))
