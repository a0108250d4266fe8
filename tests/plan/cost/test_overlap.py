"""What of the communication computation hides: never more than there is, and none where the runtime is serial."""

import numpy as np
import pytest

from spanax.plan.cost.overlap import ONCE, RUNTIMES, SERIAL, Exposed, Overlap, hide
from spanax.trace.analysis.op_groups import Phase

LAYERS = 4
ONE = np.ones(3)
SHARES = {"1 stage": ONE, "2 stages": 2 * ONE}
MOVED = {
    (Phase.FORWARD, True, "weight_gathers"): np.asarray([[0.0, 1.0, 9.0], [0.0, 0.1, 0.9]]),
    (Phase.BACKWARD, True, "weight_gathers"): np.asarray([[0.0, 1.0, 9.0], [0.0, 0.1, 0.9]]),
    (Phase.BACKWARD, True, "gradient_reductions"): np.asarray([[1.0, 1.0, 9.0], [0.1, 0.1, 0.9]]),
    (Phase.BACKWARD, True, "activations"): np.asarray([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]),
    (Phase.BACKWARD, True, ONCE): np.asarray([[1.0, 2.0, 30.0], [0.0, 0.0, 0.0]]),
    (Phase.BACKWARD, False, ONCE): np.asarray([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]),
    (Phase.UPDATE, True, "updated_weights"): np.asarray([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]),
}


def hidden_with(overlap: Overlap, window: float = 5.0, shares: np.ndarray = ONE) -> Exposed:
    computing = {(phase, inside): window * ONE for phase in Phase for inside in (True, False)}
    return hide(MOVED, computing, overlap, shares, LAYERS)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("name", RUNTIMES)
def test_exposed_time_is_never_negative_and_never_more_than_serial(name: str, shares: np.ndarray) -> None:
    result = hidden_with(RUNTIMES[name], shares=shares)
    for key, (seconds, _) in MOVED.items():
        assert (result.seconds[key] >= 0).all() and (result.seconds[key] <= seconds).all(), key
        assert (result.hidden[key] >= 0).all()


def test_a_serial_runtime_exposes_all_communication() -> None:
    result = hidden_with(SERIAL)
    for key, (seconds, _) in MOVED.items():
        assert (result.seconds[key] == seconds).all() and not result.hidden[key].any()
    assert not any(values.any() for values in result.hidden_by_term(ONE, ONE).values())


def test_hidden_time_grows_with_computation_except_for_the_first_layer() -> None:
    everything = Overlap(**dict.fromkeys(vars(SERIAL), 1.0))
    totals = [sum(hidden_with(everything, window).hidden.values()).sum() for window in (0.0, 1.0, 5.0, 1000.0)]
    assert totals[0] == 0 and totals == sorted(set(totals))
    gathers = hidden_with(everything, 1000.0).hidden[Phase.FORWARD, True, "weight_gathers"]
    assert gathers.tolist() == [0, 0.75, 6.75]


def test_no_computation_hides_two_collectives() -> None:
    everything = Overlap(**dict.fromkeys(vars(SERIAL), 1.0))
    result = hidden_with(everything, 2.0)
    backward = {key: hidden for key, hidden in result.hidden.items() if key[0] == Phase.BACKWARD}
    assert (sum(hidden for (_, inside, _), hidden in backward.items() if inside) <= 2.0 + 1e-12).all()
    assert (sum(backward.values()) <= 2 * 2.0 + 1e-12).all()
    assert result.hidden[Phase.BACKWARD, True, "activations"].tolist() == [1, 2, 2]  # the most urgent come first


def test_hidden_communication_slows_computation() -> None:
    result = hidden_with(Overlap(weight_gathers=1.0), 1000.0)
    exposed = result.seconds[Phase.FORWARD, True, "weight_gathers"]
    np.testing.assert_allclose(exposed, [0, 0.25 + 0.1 * 0.75, 2.25 + 0.1 * 6.75])


def test_gradients_of_blocks_in_a_list_hide_behind_the_whole_backward_pass() -> None:
    around = (Phase.BACKWARD, False)
    computing = {(phase, inside): 5.0 * ONE * (not inside) for phase in Phase for inside in (True, False)}
    overlap = Overlap(gradient_reductions=1.0)
    result = hide({(*around, ONCE): np.asarray([[1.0, 2.0, 30.0], [0.0, 0.0, 0.0]])}, computing, overlap, ONE, 0)
    assert result.hidden[*around, ONCE].tolist() == [1, 2, 5]
    of_layers = {(Phase.BACKWARD, True, ONCE): np.asarray([[1.0, 2.0, 30.0], [0.0, 0.0, 0.0]])}
    assert not hide(of_layers, computing, overlap, ONE, LAYERS).hidden[Phase.BACKWARD, True, ONCE].any()
