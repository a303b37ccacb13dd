from lockstep.api.evaluate import compare as compare
from lockstep.api.evaluate import evaluate as evaluate
from lockstep.api.run import Run as Run
from lockstep.api.train import recipe as recipe
from lockstep.api.train import resume as resume
from lockstep.api.train import train as train
from lockstep.config.schema import Recipe as Recipe
from lockstep.errors import LockstepError as LockstepError

__version__: str
