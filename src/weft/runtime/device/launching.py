"""The backends of a process group that weft makes, which depend on the device that this rank will compute on."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.runtime.device.backends import HOST, backend_name, named_backends, own_backend
from weft.runtime.device.facts import gather_facts
from weft.runtime.device.hardware import use_device
from weft.runtime.device.resolver import choose_device


def choose_backend(requested: str | None, *, is_launched: bool) -> str:
    """The name of a new group's backends; the device of this rank becomes the current one.

    `requested` is the user's own choice; `is_launched` says whether `weft.launch` has started the ranks.
    """
    named = {"cpu": HOST} if requested is None else named_backends(requested)
    facts = gather_facts(is_launched=is_launched, new_group=named)
    own = own_backend(facts.accelerator or "")
    if requested is None and own is not None:
        facts = replace(facts, group={str(facts.accelerator): own, "cpu": HOST})
    choice = choose_device(replace(facts, is_new=requested is None))
    device = torch.device(choice.device)
    use_device(device)
    if requested is not None:
        return requested
    shares = choice.may_share and facts.is_crowded  # which backends such as NCCL refuse
    return HOST if device.type == "cpu" or shares else backend_name(facts.group or {})
