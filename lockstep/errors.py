"""Every error that Lockstep raises on purpose.

    LockstepError
    ├── ConfigError            a recipe or an override is wrong                        exit 2
    │   ├── DoesNotFitError    the memory plan has no room for the recipe              exit 2
    │   └── RefusedError       a run of the recipe could not work; says all reasons    exit 2
    ├── ModelError             a model cannot be found, read, or used as asked         exit 4
    ├── DataError              a data file or row is missing or malformed              exit 4
    ├── TaskError              a task cannot produce what it promised                  exit 4
    ├── ChatError              messages cannot be turned into token ids, or back       exit 4
    ├── EngineError            the rollout engine cannot serve a request               exit 5
    │   ├── BusyError          too many requests wait; ask again later                 exit 5
    │   ├── SpentError         the turns or tokens of an episode are used up           exit 5
    │   └── StaleWeightsError  the engine's weights are not proven to be the learner's exit 5
    ├── SyncError              a proof of sync failed; names the tensors               exit 5
    ├── LearnerError           an update cannot be made                                exit 5
    ├── WorkerError            a worker failed unexpectedly                            exit 5
    │   └── WorkerLost         a worker died or fell silent; the run can be resumed    exit 75
    ├── CheckpointError        a checkpoint cannot be written or read                  exit 6
    │   ├── CorruptCheckpointError   a checkpoint's bytes are not those written        exit 6
    │   └── ExportError        an export is not the trained model                      exit 6
    ├── RunDirectoryError      a run directory is missing, foreign or unusable         exit 6
    │   ├── RunLockedError     another process is writing to it                        exit 6
    │   └── StorageError       the disk is full or read-only                           exit 6
    ├── EvaluationError        an evaluation or a comparison is impossible             exit 7
    ├── MachineError           this machine cannot run the recipe; gives all reasons   exit 8
    ├── Stalled                the run stands still; its stacks are in stall.txt       exit 9
    ├── HostError              a spare machine does not answer or refuses              exit 10
    ├── HealthStop             the run stopped itself; says why and what to do         exit 3
    └── Interrupted            SIGTERM or SIGINT; saved and resumable                  exit 75

To add one: subclass the nearest, give it an exit code only if a script must tell it apart, and put it in the tree above.
A message says what happened, where (file, row, setting path, sample id), and what to do.
"""

from __future__ import annotations

from lockstep.text import visible

DEFECT = "this is a defect of Lockstep: please report it, with this message and the run's log.txt"
"""The fix of an error that no setting can cause."""


class LockstepError(Exception):
    """Base of all errors raised on purpose. `what` happened, `where`, and the `fix`, each one short sentence."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        """Return the message, with control characters shown as \\x1b and the like: it may hold names and texts of files."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return visible(f"{text}\n  to fix: {self.fix}" if self.fix else text)


class ConfigError(LockstepError):
    """A recipe or an override is wrong. `mistakes` has one line each: path, value, reason, nearest name."""

    exit_code = 2

    def __init__(self, mistakes: list[str], *, where: str = "", fix: str = "") -> None:
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes), where=where, fix=fix)

    def __str__(self) -> str:
        head = f"{len(self.mistakes)} mistake{'s' if len(self.mistakes) != 1 else ''}"
        lines = [f"{head} in {self.where}:" if self.where else f"{head}:", *(f"  {line}" for line in self.mistakes)]
        return visible("\n".join([*lines, f"  to fix: {self.fix}"] if self.fix else lines))


class DoesNotFitError(ConfigError):
    """The memory plan finds no room for the recipe on this device; says by how much, and which changes would fit."""


class RefusedError(ConfigError):
    """A run of the recipe could not work as it is. `mistakes` has the name of each refusal, its reason and its fix."""

    def __str__(self) -> str:
        return visible("\n".join(["a run would be refused:", *(f"  {line}" for line in self.mistakes)]))


class ModelError(LockstepError):
    """A model cannot be found, read, or used as asked."""

    exit_code = 4


class DataError(LockstepError):
    """A data file or row is missing or malformed; `where` is file:row."""

    exit_code = 4


class TaskError(LockstepError):
    """A task cannot produce what it promised."""

    exit_code = 4


class ChatError(LockstepError):
    """Messages cannot be turned into token ids, or back."""

    exit_code = 4


class EngineError(LockstepError):
    """The rollout engine cannot serve a request."""

    exit_code = 5


class BusyError(EngineError):
    """Too many requests wait for the engine; ask again later."""


class SpentError(EngineError):
    """An episode may ask for no further reply: its turns or its tokens are used up, or it has ended."""


class StaleWeightsError(EngineError):
    """The engine was asked to sample with weights that are not proven to be the learner's."""


class SyncError(LockstepError):
    """A proof of sync failed. The message names the tensors."""

    exit_code = 5


class LearnerError(LockstepError):
    """An update cannot be made."""

    exit_code = 5


class WorkerError(LockstepError):
    """A worker failed unexpectedly; its log has the traceback. `where` names the rank and its work."""

    exit_code = 5


class WorkerLost(WorkerError):
    """A worker died, or did not answer in time. All others were ended; the run can be resumed."""

    exit_code = 75


class CheckpointError(LockstepError):
    """A checkpoint cannot be written or read."""

    exit_code = 6


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written. The message names the file."""


class ExportError(CheckpointError):
    """The export is not the trained model; nothing of it is kept."""


class RunDirectoryError(LockstepError):
    """A run directory is missing, foreign or unusable."""

    exit_code = 6


class RunLockedError(RunDirectoryError):
    """Another process is writing to the run directory."""


class StorageError(RunDirectoryError):
    """The disk refuses a file: it is full, or read-only. What was written before is complete, so the run can be resumed."""


class EvaluationError(LockstepError):
    """An evaluation cannot be made, or two scores cannot be compared."""

    exit_code = 7


class MachineError(LockstepError):
    """This machine cannot run the recipe; the message has every reason, as `lockstep doctor` finds them."""

    exit_code = 8


class Stalled(LockstepError):
    """A phase of the run stands still. The stacks of all threads and child processes are in stall.txt."""

    exit_code = 9


class HostError(LockstepError):
    """A spare machine cannot be reached, refuses a request, or does not hold what was sent."""

    exit_code = 10


class HealthStop(LockstepError):
    """The run stopped itself; the message says why and what to do."""

    exit_code = 3


class Interrupted(LockstepError):
    """SIGTERM or SIGINT arrived; the run was saved and can be resumed."""

    exit_code = 75
