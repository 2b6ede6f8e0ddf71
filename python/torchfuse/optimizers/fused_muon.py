# SPDX-License-Identifier: BSD-3-Clause
"""Muon (Jordan et al. 2024) for matrices, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchfuse._shown import shown
from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import MasterOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The native flags of each `adjust_lr_fn` and each `ns_dtype`.
_ADJUST_LR: Mapping[Any, tuple[str, ...]] = {
    None: (),
    "original": (),
    "match_rms_adamw": ("match_rms_adamw",),
    "spectral_unclamped": ("spectral_unclamped",),
}
_NS_DTYPES: Mapping[Any, tuple[str, ...]] = {
    None: (),
    torch.float32: ("ns_float32",),
    torch.bfloat16: ("ns_bfloat16",),
}
_FLAGS = ("match_rms_adamw", "spectral_unclamped", "ns_float32", "ns_bfloat16")
#: Options of other Adams whose values the AdamW of this class has.
_ADAMW_FORMULA: Mapping[str, bool] = {
    "amsgrad": False,
    "maximize": False,
    "bias_correction": True,
    "adam_w_mode": True,
    "decoupled_weight_decay": True,
}
_WITHOUT_DECAY = ("amsgrad", "maximize", "bias_correction")
#: Options that AdamW's groups have in common with torch.optim.AdamW.
_ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay")


class FusedMuon(FusedOptimizer):
    r"""Muon for matrices and AdamW for all other parameters, in one step.

    With :math:`g` the gradient and :math:`\mu` the momentum, a matrix is updated by

    .. math::
        m &\leftarrow m + (1 - \mu) (g - m) \\
        d &= m + (1 - \mu) (g - m) \quad \text{(nesterov), else } m \\
        p &\leftarrow p - \gamma \lambda p - \gamma f \, \mathrm{NS}(d)

    :math:`\mathrm{NS}` divides a matrix by its Frobenius norm and makes `ns_steps` Newton-Schulz
    iterations :math:`x \leftarrow a x + (b A + c A^2) x` with :math:`A = x x^T`, which bring all
    singular values near 1. The factor :math:`f` depends on the matrix's shape: see `adjust_lr_fn`.

    The first dimension of a parameter counts the rows of its matrix, and the other dimensions
    together count the columns, so convolutions are matrices too. Matrices of one shape are
    orthogonalized together. All parameters share one gradient norm, one loss scale and one decision
    to skip the step; see `clip_apart` for two norms.

    Args:
        params (Iterable): Parameters, parameter groups or `named_parameters()`. Parameters without
            a group, and groups without `use_muon`, are divided: parameters with two dimensions and
            more are matrices, and the others form a group for AdamW, as do empty parameters and
            uninitialized parameters of lazy modules. :meth:`split` makes groups from a model,
            without its embeddings.
        lr (float | Tensor, default 1e-3): Learning rate :math:`\gamma` of matrices.
        weight_decay (float | Tensor, default 0.1): :math:`\lambda`, at least 0.
        momentum (float | Tensor, default 0.95): :math:`\mu`, in [0, 1).
        nesterov (bool, default True): Use Nesterov momentum.
        ns_coefficients (tuple[float, float, float], default (3.4445, -4.775, 2.0315)): :math:`a`,
            :math:`b` and :math:`c`.
        eps (float, default 1e-7): Smallest norm by which a matrix is divided.
        ns_steps (int, default 5): Number of iterations, from 1 to 99.
        adjust_lr_fn (str | None, default None): The factor :math:`f` of a matrix with :math:`r`
            rows and :math:`c` columns. None or "original": :math:`\sqrt{\max(1, r / c)}`.
            "match_rms_adamw": :math:`0.2 \sqrt{\max(r, c)}`, with which AdamW's learning rate and
            weight decay fit. "spectral_unclamped": :math:`\sqrt{r / c}`.
        use_muon (bool | None, default None): Whether a group consists of matrices. False: AdamW
            updates the group. None: see `params`.
        adamw (Mapping | None, default None): `lr`, `betas`, `eps` and `weight_decay` of groups that
            AdamW updates, unless the group has the option. Missing values: `lr`, `betas` and
            `weight_decay` of this class, and `eps` 1e-8.
        betas (tuple[float | Tensor, float | Tensor], default (0.9, 0.999)): AdamW's decay rates.
        polar_express (bool, default False): Use the coefficients of Amsel et al. 2025, which differ
            between iterations and converge to singular values of 1, in the place of
            `ns_coefficients`.
        ns_dtype (torch.dtype | None, default None): Dtype of the iterations, torch.float32 or
            torch.bfloat16. None: bfloat16 on CUDA devices and on processors that multiply in
            bfloat16, otherwise float32. fp64 parameters always iterate in fp64.
        ns_batched (bool, default True): Multiply matrices of one shape together. If False, a
            matrix's result does not depend on other matrices, bit for bit, and so not on how many
            processes share the matrices.
        matrix_dims (int, default 0): Number of last dimensions that form a matrix, at least 2. A
            parameter with more dimensions is a stack of matrices, such as a layer's experts. 0: all
            dimensions form one matrix.
        max_grad_norm (float | None, default None): Maximum norm of all gradients; see
            :class:`FusedAdam`.
        clip_apart (bool, default False): The group's matrices are clipped apart: their gradients
            have one norm, and all other gradients have another. `max_grad_norm` limits each.
            `grad_norm()` and `skip_norm_above` use all gradients.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range, or if a parameter is no matrix in a group with
            `use_muon=True`. The message names the parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedMuon
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> optimizer = FusedMuon(model.parameters(), lr=0.02, adamw={"lr": 3e-4})
        >>> [(len(group["params"]), group["use_muon"]) for group in optimizer.param_groups]
        [(2, True), (2, False)]
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()

    Notes:
        Differences from torch.optim.Muon: more than two dimensions, AdamW for other parameters, and
        momentum in fp32 for 16-bit parameters. Checkpoints can be exchanged with torch's class in
        both directions, and with the pair of torch's Muon and AdamW: see :meth:`merged_state_dict`
        and :meth:`separate_state_dicts`.

        Sources: K. Jordan et al., *Muon: an optimizer for hidden layers in neural networks*, 2024;
        J. Liu et al., *Muon is scalable for LLM training*, 2025 ("match_rms_adamw"); N. Amsel et
        al., *The Polar Express*, 2025.
    """

    _algorithm = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool | None = None,
        adamw: Mapping[str, Any] | None = None,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        polar_express: bool = False,
        ns_dtype: torch.dtype | None = None,
        ns_batched: bool = True,
        matrix_dims: int = 0,
        max_grad_norm: float | None = None,
        clip_apart: bool = False,
        **options: Unpack[MasterOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": betas,
            "polar_express": polar_express,
            "ns_dtype": ns_dtype,
            "ns_batched": ns_batched,
            "matrix_dims": matrix_dims,
            "clip_apart": clip_apart,
        }
        self._adamw = _checked_adamw(type(self).__name__, adamw)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, **options)

    @classmethod
    def split(cls, model: torch.nn.Module, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Returns a model's parameters in two groups, for the constructor.

        Args:
            model (torch.nn.Module): Model. Frozen parameters are left out.
            adamw (Iterable[str], default ()): Names of further parameters for AdamW, such as the
                output layer's. A name may contain the wildcards ``*`` and ``?``.

        Returns:
            A group of matrices with `use_muon=True` and a group with `use_muon=False`, both with
            named parameters, so `param_names` of the optimizer's groups lists the choice. The
            second group contains parameters with fewer than two dimensions, the weights of
            `torch.nn.Embedding` and `EmbeddingBag`, and the parameters that `adamw` names. A group
            without parameters is left out.

        Raises:
            ValueError: If a name in `adamw` matches no parameter.

        Example:
            >>> import torch
            >>> from torchfuse.optimizers import FusedMuon
            >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
            >>> [[name for name, _ in group["params"]] for group in FusedMuon.split(model)]
            [['1.weight'], ['0.weight', '1.bias']]
            >>> optimizer = FusedMuon(FusedMuon.split(model), lr=0.02)
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        with_tied = model.named_parameters(remove_duplicate=False)
        all_names = [(name, p) for name, p in with_tied if p.requires_grad]
        embeddings = {
            id(param)  # several if the weight is parametrized
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
            for param in module.parameters()
        }
        patterns = [adamw] if isinstance(adamw, str) else list(adamw)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in all_names):
                raise ValueError(
                    f"{cls.__name__}.split: expected adamw to name parameters of the model, got "
                    f"{pattern!r}, which matches none. Choose from model.named_parameters()."
                )
        chosen = {
            id(param)
            for name, param in all_names
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        groups: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
        for name, param in named:
            matrix = _is_matrix(param) and id(param) not in embeddings | chosen
            groups[matrix].append((name, param))
        return [{"params": part, "use_muon": key} for key, part in groups.items() if part]

    @staticmethod
    def merged_state_dict(muon: Mapping[str, Any], adamw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state dicts of a torch.optim.Muon and a torch.optim.AdamW as one.

        Args:
            muon (Mapping): State dict of the matrices' optimizer.
            adamw (Mapping): State dict of the other parameters' optimizer.

        Returns:
            A state dict for an optimizer with the matrices' groups first and then the others, as
            this class makes them.

        Example:
            >>> import torch
            >>> from torchfuse.optimizers import FusedMuon
            >>> model = torch.nn.Linear(4, 2)
            >>> muon, adamw = torch.optim.Muon([model.weight]), torch.optim.AdamW([model.bias])
            >>> optimizer = FusedMuon(model.parameters())
            >>> merged = FusedMuon.merged_state_dict(muon.state_dict(), adamw.state_dict())
            >>> optimizer.load_state_dict(merged)
            >>> optimizer.param_groups[1]["weight_decay"]
            0.01
        """
        first = sum(len(group["params"]) for group in muon["param_groups"])
        later = [
            {**group, "params": [first + index for index in group["params"]]}
            for group in adamw["param_groups"]
        ]
        return {
            "state": {
                **muon["state"],
                **{first + index: state for index, state in adamw["state"].items()},
            },
            "param_groups": [*muon["param_groups"], *later],
        }

    @staticmethod
    def separate_state_dicts(
        state_dict: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a state dict of this class as those of a torch.optim.Muon and an AdamW.

        Args:
            state_dict (Mapping): A return value of `state_dict()`.

        Returns:
            The state dicts for torch.optim.Muon, with the matrices' groups, and for
            torch.optim.AdamW, with the other groups. Parameters are numbered anew in both.
        """
        parts: list[dict[str, Any]] = [{"state": {}, "param_groups": []} for _ in range(2)]
        counts = [0, 0]
        for group in state_dict["param_groups"]:
            which = 0 if group["use_muon"] else 1
            numbers = range(counts[which], counts[which] + len(group["params"]))
            counts[which] = numbers.stop
            parts[which]["param_groups"].append({**group, "params": list(numbers)})
            for number, index in zip(numbers, group["params"], strict=True):
                if index in state_dict["state"]:
                    parts[which]["state"][number] = state_dict["state"][index]
        return parts[0], parts[1]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, or two if the group has no `use_muon` and holds both kinds.

        Args:
            param_group (dict): `params` and the group's options.

        Raises:
            ValueError: If a value is out of range or a parameter is unsupported.
            TypeError: If a value has the wrong type. After either error nothing has changed.
        """
        before = len(self.param_groups)
        try:
            for group in self._divided(param_group):
                super().add_param_group(group)
        except BaseException:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_adamw", _checked_adamw(type(self).__name__, None))
        super().__setstate__(state)

    def _divided(self, group: Any) -> list[Any]:
        """Returns the group, with `use_muon`, or its matrices and its other parameters."""
        if not isinstance(group, dict) or "params" not in group:
            return [group]  # torch raises its own errors
        given = group.get("use_muon", self.defaults["use_muon"])
        if given is not None:
            return [group if given else {**self._adamw, **group}]
        params = group["params"]
        if isinstance(params, set):
            return [group]  # likewise
        params = [params] if isinstance(params, Tensor) else list(params)
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for entry in params:
            param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
            parts[_is_matrix(param)].append(entry)
        divided = [
            {**({} if key else self._adamw), **group, "params": part, "use_muon": key}
            for key, part in parts.items()
            if part
        ]
        return divided or [{**group, "params": params, "use_muon": True}]

    def _hyper_params(
        self, index: int, group: dict[str, Any], in_step: bool = True
    ) -> tuple[Any, ...]:
        where = f"{self._caller(in_step)}: expected"
        flags = (
            *_chosen(where, index, "adjust_lr_fn", group, _ADJUST_LR),
            *_chosen(where, index, "ns_dtype", group, _NS_DTYPES),
        )
        native = {
            **group,
            **{flag: flag in flags for flag in _FLAGS},
            "ns_steps": _whole(where, index, "ns_steps", group["ns_steps"]),
            "matrix_dims": _whole(where, index, "matrix_dims", group["matrix_dims"]),
        }
        return super()._hyper_params(index, native, in_step)

    def _clip_apart(self) -> list[bool]:
        if not any(group.get("clip_apart") for group in self.param_groups):
            return []
        # Also without matrices, which another process may have.
        return [group["use_muon"] and group.get("clip_apart", False) for group in self.param_groups]

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            return
        least = group["matrix_dims"] or 2
        if least < 2:
            raise ValueError(
                f"{type(self).__name__}: expected matrix_dims of group {index} to be 0 or at "
                f"least 2, got {least}."
            )
        for place, param in enumerate(group["params"]):
            if is_lazy(param):
                continue
            where = f"{type(self).__name__}: expected params[{place}] of group {index} to have"
            if param.ndim < least:
                raise ValueError(
                    f"{where} at least {least} dimensions with use_muon, got the shape "
                    f"{list(param.shape)}. Put it in a group with use_muon=False, for AdamW."
                )
            if 0 in param.shape:
                raise ValueError(
                    f"{where} no dimension of size 0 with use_muon, got the shape "
                    f"{list(param.shape)}. Put it in a group with use_muon=False."
                )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _normalize_group(self, group: dict[str, Any]) -> None:
        super()._normalize_group(group)
        for dtype in (torch.float32, torch.bfloat16):
            if f"torch.{group.get('ns_dtype')}" == str(dtype):  # C++ saves the name
                group["ns_dtype"] = dtype
        # Groups of AdamW, from torch or from FusedAdam, must have this class's formula.
        group.pop("capturable", None)
        decay = group.get("weight_decay", 0.0)
        decays = isinstance(decay, Tensor) or bool(decay)
        for key, wanted in _ADAMW_FORMULA.items():
            value = group.pop(key, wanted)
            if value != wanted and (decays or key in _WITHOUT_DECAY):
                raise ValueError(
                    f"{type(self).__name__}: expected {key} of a group without use_muon to be "
                    f"{wanted}, as in AdamW, got {shown(value)}. The class has no such option."
                )

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "momentum_buffer" in state:
            state.setdefault("step", 1)  # torch.optim.Muon does not count steps


def _checked_adamw(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options of the AdamW groups that the class makes."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name}: expected adamw to be a dict, got {type(given).__name__}.")
    options = {"eps": 1e-8, **(given or {})}
    for key in options:
        if key not in _ADAMW_OPTIONS:
            raise TypeError(
                f"{name}: expected adamw to hold {', '.join(_ADAMW_OPTIONS)}, got {key!r}. Set "
                "other options in a parameter group with use_muon=False."
            )
    return options


def _is_matrix(param: Any) -> bool:
    """Returns whether a parameter without a choice of its own is a matrix."""
    return (
        isinstance(param, Tensor)
        and not is_lazy(param)
        and param.ndim >= 2
        and 0 not in param.shape
    )


def _chosen(
    where: str, index: int, key: str, group: Mapping[str, Any], choices: Mapping[Any, Any]
) -> tuple[str, ...]:
    """Returns the native flags of a group's choice."""
    value = group[key]
    known = value is None or isinstance(value, str | torch.dtype)
    flags: tuple[str, ...] | None = choices.get(value) if known else None
    if flags is None:
        names = ", ".join(str(choice) for choice in choices)
        raise ValueError(
            f"{where} {key} of group {index} to be one of {names}, got {shown(value)}."
        )
    return flags


def _whole(where: str, index: int, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where} {key} of group {index} to be an int, got {type(value).__name__}.")
    return value
