"""Every kind of adapter that a recipe can ask for, as settings."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4, "alpha": 10},
    "rslora": {"kind": "lora", "rank": 4, "alpha": 5.5, "rslora": True},
    "dora": {"kind": "lora", "rank": 4, "dora": True},
    "gaussian": {"kind": "lora", "rank": 4, "init": "gaussian"},
    "orthogonal": {"kind": "lora", "rank": 4, "init": "orthogonal"},
    "pissa": {"kind": "lora", "rank": 4, "init": "pissa"},
    "pissa-rslora-dora": {"kind": "lora", "rank": 4, "init": "pissa", "rslora": True, "dora": True},
    "olora": {"kind": "lora", "rank": 4, "init": "olora"},
    "ia3": {"kind": "peft", "method": "ia3"},
    "vera": {"kind": "peft", "method": "vera", "options": {"r": 8}},
    "oft": {"kind": "peft", "method": "oft", "options": {"oft_block_size": 8}},
    "boft": {"kind": "peft", "method": "boft", "options": {"boft_block_size": 4}},
    "hra": {"kind": "peft", "method": "hra", "options": {"r": 4}},
    "loha": {"kind": "peft", "method": "loha", "options": {"r": 4}},
    "lokr": {"kind": "peft", "method": "lokr", "options": {"r": 4}},
    "miss": {"kind": "peft", "method": "miss", "options": {"r": 8}},
    "delora": {"kind": "peft", "method": "delora", "options": {"r": 4}},
    "randlora": {"kind": "peft", "method": "randlora", "options": {"r": 8}},
}
RESIDUAL = tuple(name for name, settings in KINDS.items() if settings.get("init") in ("pissa", "olora"))
LORAS = tuple(name for name, settings in KINDS.items() if settings["kind"] == "lora")
