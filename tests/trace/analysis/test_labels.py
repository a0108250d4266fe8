"""Roles of classes: batch, layers, indexed dims, and those of attention scores."""

import jax
import jax.numpy as jnp

from programs import array, step_of
from spanax.trace.analysis.labels import label_key, score_labels


def stack(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def test_batch_and_layers() -> None:
    step = step_of(stack, [array(4, 7, 7)], array(3, 7))
    weights, x = (step.axes.classes[value] for value in step.graph.body.inputs)
    assert step.layer_labels == {weights[0]} and step.batch_labels == {x[0]}
    assert step.labels_by_name["layers"] == [weights[0]] and step.labels_by_name["batch"] == [x[0]]


def test_classes_of_a_name_are_in_the_order_of_their_contractions() -> None:
    late, early = array(5, 11), array(7, 5)
    step = step_of(lambda late, early, x: (x @ early) @ late, [late, early], array(3, 7))
    late_labels, early_labels, x = (step.axes.classes[value] for value in step.graph.body.inputs)
    order = [label for labels in step.labels_by_name.values() for label in labels]
    assert order.index(x[0]) < order.index(early_labels[1]) < order.index(late_labels[1])


def test_an_annotated_class_has_its_name_and_its_use() -> None:
    step = step_of(stack, [array(4, 7, 7)], array(3, 7), ("depth", None, None))
    assert step.labels_by_name["depth"] == step.labels_by_name["layers"] and step.layer_labels


def test_a_table_is_looked_up_along_the_indexed_dim() -> None:
    step = step_of(lambda table, tokens: table[tokens], [array(13, 5)], array(3, 7, dtype="int32"))
    assert step.looked_up == {step.axes.classes[step.graph.body.inputs[0]][0]}
    activations = step_of(lambda w, x: (x @ w)[jnp.arange(2)], [array(7, 5)], array(3, 7))
    assert activations.looked_up == frozenset()


def test_scores_have_one_key_with_and_without_stacked_layers() -> None:
    step = step_of(stack, [array(4, 7, 7)], array(3, 7))
    layer, width, _ = step.axes.classes[step.graph.body.inputs[0]]
    assert label_key((layer, None, width)) == label_key((width, layer)) == tuple(sorted((layer, width)))
    labels = score_labels(step.axes, {label_key((width, width))}, step.layer_labels)
    assert (layer, width, width) in labels and all(label_key(each)[-2:] == (width, width) for each in labels)


def test_attention_scores_are_larger_than_their_operands() -> None:
    def attention(wq: jax.Array, wk: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("btk,bsk->bts", x @ wq, x @ wk)

    is_score = {
        length: bool(step_of(attention, [array(7, 5)] * 2, array(3, length, 7)).score_labels) for length in (8, 64)
    }
    assert is_score == {8: False, 64: True}
