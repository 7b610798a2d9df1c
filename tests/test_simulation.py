"""The simulation of machines that are not here: closed forms, symmetry, published figures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from gpuallreduce.algorithms import ALGORITHMS as PRODUCT
from gpuallreduce.cli import main
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.simulation import ALGORITHMS, PRESETS, Machine, best, estimate
from gpuallreduce.simulation.engine import Schedule, run
from gpuallreduce.simulation.geometry import of_plan, pieces
from gpuallreduce.simulation.model import plan_of, topology_of
from gpuallreduce.simulation.playing import play_chain
from gpuallreduce.simulation.published import MEASURED
from gpuallreduce.types import DTYPES

H100, A100 = PRESETS["dgx-h100"], PRESETS["dgx-a100"]
TWO_SWITCHES = PRESETS["pcie-two-switches"]
FAST = 1e9  # GB/s: as good as free
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def shown(machine):
    return [pair for pair in ALGORITHMS if pair[0] != "hierarchical" or machine.nodes > 1]


# ---- engine -------------------------------------------------------------------------------------


def test_one_transfer_takes_bytes_over_rate_plus_latency():
    schedule = Schedule()
    link = schedule.link("wire", 10.0, 3.0)
    schedule.task([(link, 50_000.0)])
    outcome = run(schedule)
    assert outcome.time_us == pytest.approx(50_000 / 10e3 + 3.0, rel=1e-12)
    assert outcome.busy_us["wire"] == pytest.approx(5.0)


def test_links_in_a_row_are_passed_at_once_and_the_slowest_sets_the_time():
    schedule = Schedule()
    links = [schedule.link(name, rate, 1.0) for name, rate in (("a", 10), ("b", 2), ("c", 5))]
    schedule.task([(link, 20_000.0) for link in links])
    assert run(schedule).time_us == pytest.approx(20_000 / 2e3 + 3.0)


def test_tasks_queue_for_a_link_and_it_is_never_idle_meanwhile():
    schedule = Schedule()
    link = schedule.link("wire", 1.0, 0.5)
    tasks = [schedule.task([(link, 1000.0)]) for _ in range(7)]
    assert run(schedule).ends_us == [pytest.approx(i + 1.5) for i in range(len(tasks))]


def test_a_task_waits_for_all_that_it_follows_and_not_for_the_latency_of_what_was_sent():
    schedule = Schedule()
    link, other = schedule.link("wire", 1.0, 10.0), schedule.link("other", 1.0, 0.0)
    first = schedule.task([(link, 1000.0)])
    second = schedule.task([(other, 2000.0)], sent=[first])
    third = schedule.task([(other, 1.0)], after=[first, second], delay_us=4.0)
    ends = run(schedule).ends_us
    assert ends[first] == pytest.approx(11.0)
    assert ends[second] == pytest.approx(3.0)
    assert ends[third] == pytest.approx(11.0 + 4.0 + 0.001)


def test_pieces_are_the_whole():
    assert pieces(10, 4) == [4, 4, 2]
    assert pieces(8, 4) == [4, 4]
    assert pieces(0, 4) == [0]


# ---- closed forms -------------------------------------------------------------------------------

PLAIN = Machine(
    "plain", gpus=2, nics=1, link_gbps=100.0, memory_gbps=FAST, hop_us=2.0, launch_us=3.0
)


@pytest.mark.parametrize("nbytes", [4 * KIB, 100_000, MIB])
def test_two_ranks_swap_their_arrays_in_bytes_over_rate_plus_latency(nbytes):
    found = estimate(PLAIN, "one_shot", "rank", nbytes)
    assert found.time_us == pytest.approx(3 + 2 + nbytes / 100e3, rel=1e-6)
    assert found.bound_us == pytest.approx(nbytes / 100e3)
    assert found.busiest == "NVLink"


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("pair", [("two_shot", "rank"), ("ring", "any")])
def test_bandwidth_bound_is_the_textbook_one_and_is_reached(pair, gpus):
    machine = replace(PLAIN, gpus=gpus)
    found = estimate(machine, *pair, GIB)
    assert found.bound_us == pytest.approx(2 * (gpus - 1) / gpus * GIB / 100e3, rel=1e-6)
    assert 0.99 <= found.fraction <= 1
    assert found.busbw_gbps == pytest.approx(100, rel=0.01)


def test_a_ring_of_tiny_arrays_takes_one_hop_per_step():
    machine = replace(PLAIN, gpus=8)
    for order in ("any", "rank"):
        found = estimate(machine, "ring", order, 1024)
        assert found.time_us == pytest.approx(3 + 2 + 14 * 2, abs=0.2)
        assert found.bottleneck == "latency"


def test_one_shot_sends_its_array_to_everyone():
    machine = replace(PLAIN, gpus=8)
    assert estimate(machine, "one_shot", "rank", MIB).bound_us == pytest.approx(7 * MIB / 100e3)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_hierarchical_sends_across_nodes_what_the_design_says(nodes):
    machine = replace(H100, nodes=nodes, link_gbps=FAST, memory_gbps=FAST)
    n, wire = 64 * MIB, 8 * 48e3
    found = estimate(machine, "hierarchical", "any", n)
    assert found.busiest == "network"
    assert found.bound_us == pytest.approx(2 * (nodes - 1) / nodes * n / wire)
    # Rank order: a partial one way and a result the other, each n/g; ends send one of the two.
    both = 2 if nodes > 2 else 1
    found = estimate(machine, "hierarchical", "rank", n)
    assert found.bound_us == pytest.approx(both * n / wire)
    half = estimate(machine, "hierarchical", "rank", n, dtype=DTYPES["float16"])
    assert half.bound_us == pytest.approx((both + 1) * n / wire)


def test_a_chain_sends_partials_and_results():
    machine = replace(PLAIN, gpus=4)
    n = 64 * MIB
    assert estimate(machine, "ring", "rank", n).bound_us == pytest.approx(2 * n / 100e3)
    half = estimate(machine, "ring", "rank", n, dtype=DTYPES["float16"])
    assert half.bound_us == pytest.approx(3 * n / 100e3)


def test_bounds_agree_with_what_the_product_counts_as_sent():
    for (name, order), gpus in itertools.product(shown(H100)[:4], (2, 4, 8)):
        machine = replace(H100, gpus=gpus, nics=1, memory_gbps=FAST)
        plan = plan_of(machine, name, order, 8 * MIB, DTYPES["float32"], direct=False)
        bound_us = estimate(machine, name, order, 8 * MIB).bound_us
        assert bound_us == pytest.approx(plan.bytes_sent / (machine.link_gbps * 1e3)), name


# ---- properties ---------------------------------------------------------------------------------

MACHINES = [
    H100,
    replace(A100, nodes=3, gpus=4, nics=2),
    TWO_SWITCHES,
    replace(H100, nodes=16),
]


@pytest.mark.parametrize("machine", MACHINES, ids=Machine.describe)
def test_larger_arrays_take_longer_and_no_call_beats_its_bound(machine):
    for name, order in shown(machine):
        found = [estimate(machine, name, order, 1 << shift) for shift in range(10, 31, 4)]
        times = [each.time_us for each in found]
        assert times == sorted(times), name
        assert all(0 <= each.fraction <= 1 + 1e-9 for each in found), name


@pytest.mark.parametrize(
    "machine",
    [
        H100,
        replace(H100, nodes=2),
        replace(H100, nodes=5, gpus=4, nics=4),
        replace(A100, nodes=3, gpus=4, nics=2),
        TWO_SWITCHES,
        replace(TWO_SWITCHES, nodes=2),
    ],
    ids=Machine.describe,
)
def test_ranks_that_stand_for_others_give_what_all_ranks_give(machine):
    for (name, order), nbytes in itertools.product(shown(machine), (4 * KIB, MIB, 16 * MIB)):
        part = estimate(machine, name, order, nbytes)
        whole = estimate(machine, name, order, nbytes, whole=True)
        assert whole.symmetry == "none"
        assert whole.played == "whole"
        assert part.bound_us == pytest.approx(whole.bound_us, rel=1e-6), name
        assert part.time_us == pytest.approx(whole.time_us, rel=0.05), (name, order, nbytes)


@pytest.mark.parametrize(
    ("machine", "name", "order", "nbytes"),
    [
        (H100, "one_shot", "rank", 60_000_000),
        (H100, "two_shot", "rank", 500_000_000),
        (H100, "ring", "any", 300_000_000),
        (replace(A100, nodes=8, gpus=4, nics=4), "ring", "any", 90_000_000),
        (replace(A100, nodes=8, gpus=4, nics=4), "nccl_ring", "any", 90_000_000),
        (replace(A100, nodes=12, gpus=2, nics=2), "ring", "any", 4096),
    ],
)
def test_what_is_extrapolated_is_what_would_have_been_played(machine, name, order, nbytes):
    part = estimate(machine, name, order, nbytes)
    whole = estimate(machine, name, order, nbytes, whole=True)
    assert (part.played, whole.played) == ("extrapolated", "whole")
    assert part.time_us == pytest.approx(whole.time_us, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "name", "nbytes", "tasks"),
    [
        (replace(H100, gpus=4, nics=4), "ring", 900_000_000, 500),  # fewer rounds
        (replace(H100, nodes=24, gpus=4, nics=4), "ring", 900_000_000, 5000),  # fewer nodes
        (replace(H100, nodes=24, gpus=4, nics=4), "hierarchical", GIB, 2500),
    ],
)
def test_a_part_of_a_chain_gives_what_the_whole_gives(monkeypatch, machine, name, nbytes, tasks):
    monkeypatch.setattr("gpuallreduce.simulation.playing.TASKS", 10**9)
    whole = estimate(machine, name, "rank", nbytes)
    monkeypatch.setattr("gpuallreduce.simulation.playing.TASKS", tasks)
    part = estimate(machine, name, "rank", nbytes)
    assert (part.played, whole.played) == ("extrapolated", "whole")
    assert part.time_us == pytest.approx(whole.time_us, rel=0.05)


def test_the_bottleneck_is_named():
    def named(machine, name, nbytes=GIB):
        return estimate(machine, name, "any" if name == "ring" else "rank", nbytes).bottleneck

    assert named(H100, "two_shot") == "NVLink"
    assert named(H100, "two_shot", KIB) == "latency"
    assert named(replace(H100, memory_gbps=200.0), "two_shot") == "memory"
    assert named(replace(H100, nodes=4), "hierarchical") == "network"
    assert named(PRESETS["pcie-one-switch"], "ring") == "PCIe"
    assert named(TWO_SWITCHES, "two_shot") == "PCIe switch"
    assert named(TWO_SWITCHES, "ring") == "PCIe"


def test_all_network_cards_are_used_by_hierarchical_and_one_by_a_ring():
    machine = replace(H100, nodes=8)
    ring = estimate(machine, "ring", "any", GIB).busbw_gbps
    assert ring == pytest.approx(machine.net_gbps, rel=0.02)
    assert estimate(machine, "nccl_ring", "any", GIB).busbw_gbps > 7 * ring
    assert estimate(machine, "hierarchical", "any", GIB).busbw_gbps > 4 * ring
    assert estimate(machine, "hierarchical", "rank", GIB).busbw_gbps > 4 * ring


def test_thousands_of_ranks_are_simulated_in_their_number():
    machine = replace(H100, nodes=512)
    for name, order in ALGORITHMS:
        found = estimate(machine, name, order, 64 * KIB)
        assert found.nranks == 4096
        assert found.time_us > 0


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda each: each.name)
def test_presets_can_be_simulated_on_one_node_and_on_two(preset):
    for machine in (preset, replace(preset, nodes=2)):
        for name, order in shown(machine):
            found = estimate(machine, name, order, MIB)
            assert 0 < found.busbw_gbps < 2 * machine.link_gbps


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 1},
        {"nodes": 0},
        {"nics": 3},
        {"switches": 2},
        {"link_gbps": 0.0},
        {"net_gbps": float("nan")},
        {"hop_us": -1.0},
    ],
)
def test_machines_that_cannot_be_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        replace(H100, **wrong)


def test_what_cannot_be_estimated_is_refused():
    for arguments in (("hierarchical", "any", MIB), ("one_shot", "any", MIB), ("ring", "any", 2)):
        with pytest.raises(InvalidArgument):
            estimate(H100, *arguments)


def test_the_best_of_an_order_is_the_products():
    rows = [estimate(replace(H100, nodes=4), *pair, GIB) for pair in ALGORITHMS]
    assert best(rows).algorithm == "hierarchical"
    assert best(rows, "any").order == "any"
    assert best(rows, "any").algorithm != "nccl_ring"


# ---- the tuner's formulas -----------------------------------------------------------------------

# How far the tuner's estimate may lie from the simulation of the same plan: below, above.
TOLERANCE = {
    ("one_shot", "rank", False): (0.13, 0.13),
    ("two_shot", "rank", False): (0.05, 0.18),
    ("two_shot", "rank", True): (0.01, 0.01),
    ("ring", "any", False): (0.10, 0.18),
}


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "dgx-b200", "pcie-one-switch"])
@pytest.mark.parametrize(("name", "order", "direct"), TOLERANCE)
def test_the_tuners_formulas_agree_with_the_simulation(name, order, direct, preset):
    below, above = TOLERANCE[name, order, direct]
    for gpus, shift in itertools.product((2, 4, 8), range(10, 31, 2)):
        machine = replace(PRESETS[preset], gpus=gpus, nics=1)
        plan = plan_of(machine, name, order, 1 << shift, DTYPES["float32"], direct=direct)
        cost_us = PRODUCT[name].cost_us(plan.request, plan.config.access, topology_of(machine))
        found_us = estimate(machine, name, order, 1 << shift, direct=direct).time_us
        assert 1 - below < cost_us / found_us < 1 + above, (gpus, 1 << shift)


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "dgx-b200", "pcie-one-switch"])
def test_the_tuners_formula_for_a_chain_agrees_with_the_simulation(preset):
    for gpus, shift in itertools.product((2, 4, 8), range(10, 31, 2)):
        machine, nbytes = replace(PRESETS[preset], gpus=gpus, nics=1), 1 << shift
        plan = plan_of(machine, "ring", "rank", nbytes, DTYPES["float32"], direct=False)
        cost_us = PRODUCT["ring"].cost_us(plan.request, plan.config.access, topology_of(machine))
        found = estimate(machine, "ring", "rank", nbytes)
        assert found.bound_us < cost_us < 1.15 * found.time_us
        if gpus > 2:  # two ranks wait for each other's chunks besides
            assert cost_us > 0.95 * found.time_us, (gpus, nbytes)


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "dgx-b200", "pcie-one-switch"])
def test_a_chains_chunks_are_nearly_as_good_as_the_best(preset):
    for gpus, shift in itertools.product((2, 4, 8), range(12, 29, 2)):
        machine, nbytes = replace(PRESETS[preset], gpus=gpus, nics=1), 1 << shift
        plan = plan_of(machine, "ring", "rank", nbytes, DTYPES["float32"], direct=False)
        cut = of_plan(plan, 1.0)
        chunks = [1 << each for each in range(12, 18)]
        times = [
            play_chain(machine, replace(cut, step_bytes=float(each * plan.config.nchannels)), False)
            for each in chunks
        ]
        best_us = min(found["time"] for found, *_ in times)
        assert play_chain(machine, cut, False)[0]["time"] < 1.2 * best_us, (gpus, nbytes)


# ---- published measurements ---------------------------------------------------------------------


@pytest.mark.parametrize("each", MEASURED, ids=lambda each: f"{each.what}, {each.nbytes}")
def test_published_measurements_are_met_within_the_recorded_error(each):
    assert abs(each.error_percent(each.simulated())) <= each.within
    assert each.source.startswith("https://")
    assert 0 < each.low <= each.high


def test_errors_count_from_the_nearer_end_of_a_range():
    each = replace(MEASURED[0], low=100.0, high=200.0)
    assert each.error_percent(150.0) == 0
    assert each.error_percent(90.0) == pytest.approx(-10)
    assert each.error_percent(220.0) == pytest.approx(10)


# ---- command line -------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_size_and_algorithm(capsys):
    asked = ["simulate", "--nodes", "16", "--gpus", "8", "--nvlink", "370", "--net", "50"]
    assert main([*asked, "--latency", "12", "-b", "1M", "-e", "4M", "-f", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows[:: len(ALGORITHMS)]] == ["1048576", "2097152", "4194304"]
    assert [(row[1], row[2]) for row in rows[: len(ALGORITHMS)]] == list(ALGORITHMS)
    assert "simulated, not measured" in out
    assert "16 nodes of 8 GPUs" in out
    assert "stands for" in out
    for row in rows:
        nbytes, time_us, algbw, busbw = (float(row[i]) for i in (0, -6, -5, -4))
        assert algbw == pytest.approx(nbytes / time_us / 1e3, abs=0.01, rel=0.01)
        assert busbw == pytest.approx(algbw * 2 * 127 / 128, abs=0.02, rel=0.01)


def test_json_says_the_same_and_more(capsys):
    assert main(["simulate", "--preset", "dgx-a100", "--json", "-b", "1M", "-e", "1M"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["link_gbps"] == pytest.approx(240)
    assert {(row["algorithm"], row["order"]) for row in found["results"]} == set(shown(A100))
    row = found["results"][0]
    assert row["time_us"] == pytest.approx(estimate(A100, "one_shot", "rank", MIB).time_us)
    assert row["fraction_of_bound"] == pytest.approx(row["bound_us"] / row["time_us"])


def test_options_change_the_machine(capsys):
    asked = ["simulate", "--json", "-b", "1M", "-e", "1M", "--algorithm", "ring", "--order", "any"]
    assert main([*asked, "--pcie", "22", "--gpus", "4", "--hop", "3", "--memory", "800"]) == 0
    found = json.loads(capsys.readouterr().out)
    machine = found["machine"]
    assert (machine["link"], machine["link_gbps"], machine["gpus"]) == ("PCIe", 22, 4)
    assert (machine["nics"], machine["hop_us"], machine["memory_gbps"]) == (4, 3, 800)
    assert [row["algorithm"] for row in found["results"]] == ["ring"]
    assert found["results"][0]["busiest_link"] == "PCIe"


def test_presets_are_listed(capsys):
    assert main(["simulate", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in PRESETS)


def test_the_check_prints_every_error_and_fails_when_one_has_grown(capsys, monkeypatch):
    assert main(["simulate", "--check"]) == 0
    out = capsys.readouterr().out
    assert out.count("https://") == len(MEASURED)
    assert all(each.what in out for each in MEASURED)
    assert main(["simulate", "--check", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(MEASURED) >= 6
    worse = (replace(MEASURED[0], low=1000.0, high=1000.0),)
    monkeypatch.setattr("gpuallreduce.simulation.published.MEASURED", worse)
    assert main(["simulate", "--check"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nvlink", "1", "--pcie", "1"], "both"),
        (["--gpus", "1"], "2 ranks"),
        (["--algorithm", "hierarchical"], "--nodes"),
        (["--algorithm", "one_shot", "--order", "any"], "no order"),
        (["-b", "1M", "-e", "1K"], "-e"),
        (["-f", "1"], "-f 1"),
        (["-b", "2", "-e", "2"], "4 bytes"),
        (["--plot", "x.pdf"], ".png"),
        (["--nvlink", "-5"], "above 0"),
    ],
)
def test_options_without_a_meaning_end_with_status_2_and_say_why(capsys, arguments, said):
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_plot_is_a_png(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    asked = ["simulate", "--nodes", "2", "-b", "1K", "-e", "1M", "-f", "32", "--plot", str(path)]
    assert main(asked) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out


def test_importing_the_package_does_not_load_the_simulation():
    code = "import sys, gpuallreduce; print('gpuallreduce.simulation' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd="/",
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
