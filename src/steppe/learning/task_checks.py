"""Checks on the tasks that a learner is given, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from steppe.checkpoint.tree import State
from steppe.data.collate import Pair
from steppe.data.dataset_samples import DatasetSamples
from steppe.data.samples import TensorSamples
from steppe.data.task import Task
from steppe.errors import (
    DataError,
    DivergedError,
    LayerDivergedError,
    ModelError,
    ShapesDifferError,
    SteppeError,
    UsageError,
    one_line,
)
from steppe.learning.input_kind import Kind, check_scaled_alike, difference, kind_of, shapes
from steppe.learning.output_checks import (
    check_gradient,
    check_head_possible,
    check_loss,
    check_output,
    check_targets,
    count_outputs,
    describe_if_unusable,
    expected_output,
)
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import Method
from steppe.methods.parts.single_sample_checks import accepts_single_sample, single_sample_error
from steppe.network.eval_batches import min_eval_batch
from steppe.network.growing_head import GrowingHead
from steppe.network.heads import is_class_numbers
from steppe.network.network import Network
from steppe.runtime.rng import preserve_global_rng
from steppe.settings import TrainingConfig
from steppe.tensors.batch import Batch
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, concat_nests, leaves, map_nest, nest_length
from steppe.tensors.ragged import Ragged

_NONE = type(None)
_LOOKED_AT = 4  # samples of each part of a task; several, because sequences may differ in length
_MOST_DECAYS = 100_000  # of the learning rates in a task


def validate_task(
    task: Task, network: Network, earlier: Kind | None, head: GrowingHead | None = None
) -> tuple[Kind, int]:
    """Return the kind of the task's inputs and how many outputs the model has, or needs if its head grows.

    Args:
        task: The task.
        network: The network.
        earlier: The kind of earlier tasks' inputs.
        head: The output layer, if it grows.

    Returns:
        The kind and the number of outputs.

    Raises:
        DataError: The data does not fit the model, its head or the inputs of earlier tasks.
        ModelError: The model does not return differentiable logits.
    """
    x, y = probe_samples(task, network)
    kind = kind_of(x)
    if earlier is not None and (differs := difference(kind, earlier)) is not None:
        raise DataError(
            f"{task.name}: inputs are {differs[0]}, but those of earlier tasks are {differs[1]}; all tasks need inputs "
            "of the same type and shape."
        )
    try:
        with torch.enable_grad(), network.mode(training=False):
            output = network.forward(prepared_copy(network, x))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = one_line(error)
        raise DataError(f"{task.name}: inputs of shape {shapes(kind)} do not fit the model: {reason}") from error
    check_output(output, nest_length(x), network)
    check_gradient(output, network, x)
    check_head_possible(task, output)
    outputs = count_outputs(output)
    if head is not None:
        check_columns(output, head)
        outputs = max(outputs, outputs_needed(task))
    task.check_head(outputs)
    for words, part in (("training", task.train), ("test", task.test), ("validation", task.val)):
        if part is None:
            continue
        with task.error_context(words):
            first, label = part.first(_LOOKED_AT)
            first = network.inputs.as_stored(first)
            if isinstance(part, TensorSamples):
                check_targets(task, part.y, _allowed_outputs(part.y, outputs, words, head), network)
            elif words == "training":
                check_targets(task, label, outputs, network)
        own = kind_of(first)
        if [part[:2] for part in own] != [part[:2] for part in kind]:
            raise DataError(
                f"{task.name}: {words} inputs have shape {shapes(own)}, but training inputs have {shapes(kind)}; "
                "both need the same shape."
            )
        with task.error_context(words):
            check_scaled_alike(first, kind, network)
    if head is not None:  # as if it had grown
        output = pad(output, (0, outputs - head.rows))
    check_loss(task, output, y, network)
    return kind, outputs


def check_columns(output: Tensor, head: GrowingHead) -> None:
    """Raise ModelError if the model's output is not that of its growing head."""
    if (found := count_outputs(output)) != head.rows:
        raise ModelError(
            f"the layer {head.name!r} has {head.rows} outputs, but the model returns {found}; with grow=True the model "
            "must return that layer's outputs, however many there are."
        )


def outputs_needed(task: Task) -> int:
    """Return how many outputs the task needs: up to the end of its head, or without one up to its highest label.

    Raises:
        DataError: The labels are no class numbers, or cannot be read before learning.
    """
    if task.head is not None:
        return task.head.stop
    with task.error_context("training"):
        if isinstance(task.train, TensorSamples):
            return most_outputs(task.train.y, 0)
        if isinstance(task.train, DatasetSamples):
            return max(most_outputs(y, 0) for _, y in task.train.batches(512, None))
        raise DataError(
            "is a DataLoader or a stream, whose labels are not known in advance; pass a Dataset, or tensors."
        )


def most_outputs(y: Tensor, outputs: int) -> int:
    """Return the number of outputs that class numbers need, at least `outputs`."""
    if not is_class_numbers(y):
        raise DataError(f"has targets {y.dtype} of shape {tuple(y.shape)}; grow=True needs class numbers, (n,).")
    return max(outputs, int(y.max()) + 1) if len(y) else outputs


def _allowed_outputs(y: Tensor, outputs: int, part: str, head: GrowingHead | None) -> int:
    """How many outputs labels may index: in test data of a head that grows, also classes that have not come yet."""
    return outputs if head is None or part != "test" else most_outputs(y, outputs)


def probe_inputs(task: Task, network: Network) -> Nest:
    """Return the fewest stored inputs of the task that the model accepts."""
    return probe_samples(task, network)[0]


def probe_samples(task: Task, network: Network) -> Pair:
    """Return the fewest stored inputs of the task that the model accepts, with their targets."""
    with task.error_context("training"):
        x, y = task.train.first(min_eval_batch(network.model))
        x = network.inputs.as_stored(x)
    if nest_length(x) >= min_eval_batch(network.model):
        return x, y
    return concat_nests([x, x]), concat_nests([y, y])


def diagnose(error: Exception, group: TaskGroup, network: Network) -> SteppeError | None:
    """Return a clearer error for one that was raised in learning; None if there is nothing to add.

    The model's output in train mode is checked only after a failure, because a forward in that mode may change it.
    """
    if isinstance(error, ShapesDifferError):
        return DataError(f"{group.name}: {error}")
    if isinstance(error, LayerDivergedError):
        return DivergedError(f"task {group.name!r}: {error}")
    if not isinstance(
        error, (TypeError, AttributeError, LookupError)
    ):  # raised where something else is used as a tensor
        return None
    before = network.snapshot()
    try:
        x, _ = group.tasks[0].train.first()
        with torch.no_grad(), network.mode(training=True), preserve_global_rng(network.device):
            output = call_model(network.model, network.prepare_inputs(concat_nests([x, x])))  # BatchNorm needs two
    except Exception:  # nothing to add to the first error
        return None
    finally:
        network.restore(before)
    problem = describe_if_unusable(output, 2, network)
    if problem is None:
        return None
    return ModelError(
        f"in train mode too, {expected_output(network)}, got {problem}; disable auxiliary outputs (such as "
        "aux_logits=False), or return the logits alone."
    )


def check_last_batch(method: Method, network: Network, group: TaskGroup, size: int) -> None:
    """Check that the last batch is not a single sample that BatchNorm cannot normalize.

    Only for methods that pass the batch to the model without other samples. The batches of a DataLoader are not known
    here, so they are not checked.

    Args:
        method: The method.
        network: The network, in the mode in which it learns.
        group: The tasks to learn.
        size: Samples per batch.

    Raises:
        DataError: It is such a sample.
    """  # noqa: DOC501
    sources = [task.train for task in group.tasks]
    norms = [module for module in network.model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    if not method.uses_bare_batch or not any(norm.training for norm in norms):
        return
    if not all(isinstance(source, (TensorSamples, DatasetSamples)) for source in sources):
        return
    if (sum(map(len, sources)) - 1) % size == 0:
        x, y = sources[0].first()
        if not accepts_single_sample(network, network.prepare(Batch.of_task(x, y, group.first))):
            raise single_sample_error(group.name)


def check_same_task(interrupted: State, group: TaskGroup, training: TrainingConfig) -> None:
    """Raise UsageError if a task is not the interrupted one, or is to be learned in another way."""
    if interrupted["task"] != group.name or not training.equals(interrupted["training"]):
        raise UsageError(
            f"the learner was saved in the middle of {interrupted['task']!r}, learned with {interrupted['training']}; "
            f"resume that first (got {group.name!r} with {training.as_dict()})."
        )
    described = interrupted.get("tasks")
    differs = None if described is None else _difference(described, group)
    if differs is not None:
        raise UsageError(
            f"the learner was saved in the middle of {interrupted['task']!r}, but {differs}; pass the same data and "
            "head to resume it."
        )


def check_loop_state(loop_state: State) -> None:
    """Raise ValueError if the state of an interrupted task is invalid."""
    if not isinstance(loop_state, dict):
        return
    if (validation := loop_state["validation"]) and validation["cuts"] > _MOST_DECAYS:
        raise ValueError(f"invalid number of learning-rate decays: {validation['cuts']}")
    for each in loop_state.get("tasks", []):  # older states have no such entry
        kinds = type(each["head"]), type(each["samples"]), type(each["digest"])
        known_kinds = ((range, _NONE), (int, _NONE), (str, _NONE))
        if any(kind not in known for kind, known in zip(kinds, known_kinds, strict=True)):
            raise ValueError("invalid description of the interrupted task's data")


def _difference(saved: Sequence[State], group: TaskGroup) -> str | None:
    """Describe how the tasks differ from those in a state; None if they do not, as far as that is known."""
    if len(saved) != len(group.tasks):
        return f"got {len(group.tasks)} tasks instead of {len(saved)}"
    for task, before, now in zip(group.tasks, saved, group.described, strict=True):
        if before["head"] != now["head"]:
            return f"{task.name!r} now has the head {now['head']} instead of {before['head']}"
        if before["samples"] != now["samples"]:
            return f"{task.name!r} now has {now['samples']} training samples instead of {before['samples']}"
        if None not in (before["digest"], now["digest"]) and before["digest"] != now["digest"]:
            return f"{task.name!r} now has other training samples"
    return None


def prepared_copy(network: Network, x: Nest) -> Nest:
    """Return a copy of stored samples as the model's inputs.

    Raises:
        UsageError: `input_transform` works in place.
    """
    given = map_nest(lambda leaf: leaf.to(network.device, copy=True), x)  # as for batches; a later move hides changes
    parts = [part for leaf in leaves(given) for part in (leaf.rows if isinstance(leaf, Ragged) else (leaf,))]
    before = [(part._version, part.clone()) for part in parts]
    prepared = network.prepare_inputs(given)
    if any(
        part._version != version or not torch.equal(part, copy)  # a NumPy view counts no version
        for part, (version, copy) in zip(parts, before, strict=True)
    ):
        raise UsageError(
            "`input_transform` changes its input in place, but batches are prepared several times and kept for replay; "
            "return a new tensor, such as (x - 5) / 2 instead of x.sub_(5).div_(2)."
        )
    return prepared


def as_task_list(tasks: Task | Sequence[Task]) -> list[Task]:
    """Return one task or several as a list."""
    listed = list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in listed:
        if not isinstance(task, Task):
            raise UsageError(
                f"expected a steppe.Task, got {type(task).__name__}; create one "
                "with steppe.Task((inputs, labels), ...)."
            )
    if not listed:
        raise DataError("got no task; pass at least one.")
    return listed
