"""The two kinds of error a user may see as one line: bad input, and a gate that refused."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the file or field and the remedy."""


class GateError(InputError):
    """A stage's output broke a promise that the next stage relies on.

    Attributes:
        gate: Name of the gate, as in docs/architecture.md (`MaskGate`, `ExportGate`, ...).
        field: What was checked: a tensor, a config key, a row.
    """

    def __init__(self, gate: str, field: str, message: str):
        super().__init__(f"{gate}: {field}: {message}")
        self.gate = gate
        self.field = field
        self.reason = message
