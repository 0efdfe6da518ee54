"""Adafactor (torch/optim/_adafactor.py): factors instead of a second moment.

A gradient of two or more dimensions has a factor without its last and one without its last but
one; a vector has its variance. Temporaries the size of the parameters remain: foreach has those of
all matrices alive at once, and still has them when it makes those of the vectors.
"""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer
from planner.step.pointwise import like
from planner.step.reductions import reduction_of, take_reduced, take_reduction
from planner.step.strides import Shape, contiguous_strides
from planner.step.tensor import Parameter, Tensor, empty


class Adafactor(Optimizer):
    """row_var and col_var of matrices, variance of vectors."""

    def step(self) -> None:
        if not self.state:
            self._make_factors()
        if self.is_foreach:
            self._foreach()
        else:
            self._forloop()

    def _make_factors(self) -> None:
        names = ("row_var", "col_var", "variance")
        self.state = {name: [] for name in names}
        for parameter in self.parameters:
            if _is_matrix(parameter):
                shapes = (_without(parameter, -1), _without(parameter, -2))
                for name, shape in zip(names, shapes, strict=False):
                    factor = empty(self.device, shape, parameter.dtype, "aten.new_zeros")
                    self.state[name].append(self.keep(factor))
            else:
                variance = like(parameter, "aten.zeros_like")
                self.state["variance"].append(self.keep(variance))

    def _foreach(self) -> None:
        groups: dict[bool, list[Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault(_is_matrix(parameter), []).append(parameter)
        updates: list[Tensor] = []
        for is_multidim, parameters in groups.items():
            for parameter in parameters:
                self._norm(parameter)
            if is_multidim:
                var_estimates = self._estimates_of_matrices(parameters)
            else:
                grads_squared = [self.temporary(p, "aten._foreach_mul") for p in parameters]
                del grads_squared
                var_estimates = [self.temporary(p, "aten.clone") for p in parameters]
            updates = var_estimates
            for update in updates:
                self.in_place("aten._foreach_mul_", update, 2, times=3)
                self._norm(update)
                self.in_place("aten._foreach_add_", update, 2, times=2)
            del update
        del updates, var_estimates

    def _estimates_of_matrices(self, parameters: list[Parameter]) -> list[Tensor]:
        for dim in (-1, -2):
            means = [self._mean_square(p, dim) for p in parameters]
            del means
        var_estimates = [self._outer_product(p) for p in parameters]
        row_var_means = [self._mean_of_rows(p) for p in parameters]
        for estimate in var_estimates:
            self.in_place("aten._foreach_div_", estimate, 1)
        del row_var_means
        return var_estimates

    def _forloop(self) -> None:
        row_mean = col_mean = grad_squared = var_estimate = update = None
        for parameter in self.parameters:
            self._norm(parameter)
            if _is_matrix(parameter):
                row_mean = self._mean_square(parameter, -1)
                col_mean = self._mean_square(parameter, -2)
                var_estimate = self._outer_product(parameter)
                self._mean_of_rows(parameter)
                self.in_place("aten.div_", var_estimate, 1)
            else:
                grad_squared = self.temporary(parameter, "aten.mul", 2)
                var_estimate = self.temporary(parameter, "aten.clone")
            update = var_estimate
            self.in_place("aten.mul_", update, 2, times=3)
            self._norm(update)
            self.in_place("aten.add_", update, 2)
        del row_mean, col_mean, grad_squared, var_estimate, update

    def _norm(self, tensor: Tensor) -> None:
        """`tensor.norm(2).item()`: a scalar that is read at once."""
        label = "aten.linalg_vector_norm"
        scalar = empty(self.device, (), tensor.dtype, label)
        take_reduction(tensor, range(len(tensor.shape)), label)
        self.device.compute(label, "reduction", tensor.dtype, tensor.numel, tensor.num_bytes)
        del scalar

    def _mean_square(self, parameter: Parameter, dim: int) -> Tensor:
        """`torch.norm(grad, dim=dim, keepdim=True)`, squared and divided in place."""
        label = "aten.linalg_vector_norm"
        mean = empty(self.device, _without(parameter, dim), parameter.dtype, label)
        take_reduction(parameter, (dim % len(parameter.shape),), label)
        self.device.compute(label, "reduction", mean.dtype, parameter.numel, parameter.num_bytes)
        return mean

    def _outer_product(self, parameter: Parameter) -> Tensor:
        """`row_var @ col_var`: the size of the parameter."""
        label = "aten.mm" if len(parameter.shape) == 2 else "aten.bmm"
        product = empty(self.device, parameter.shape, parameter.dtype, label)
        self.device.compute(label, "matmul", product.dtype, 2 * product.numel, product.num_bytes)
        return product

    def _mean_of_rows(self, parameter: Parameter) -> Tensor:
        """`row_var.mean(dim=-2, keepdim=True)`."""
        shape = (*parameter.shape[:-2], 1, 1)
        mean = empty(self.device, shape, parameter.dtype, "aten.mean")
        rows = _without(parameter, -1)
        found = reduction_of(rows, contiguous_strides(rows), (len(rows) - 2,))
        if found is not None:
            take_reduced(self.device, "", found, "aten.mean")
        return mean


def _is_matrix(parameter: Tensor) -> bool:
    return len(parameter.shape) > 1


def _without(parameter: Tensor, dim: int) -> Shape:
    """The shape with size 1 in `dim`."""
    shape = list(parameter.shape)
    shape[dim] = 1
    return tuple(shape)
