"""Sums of digits: a taskset of verifiers, with two rewards."""

import re

import verifiers.v1 as vf

__all__ = ["DigitSums"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(bool(numbers) and numbers[-1] == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    most: int = 9


class DigitSums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a in range(self.config.most):
            for b in range(4):
                yield SumTask(
                    SumData(prompt=f"{a} + {b} =", answer=str(a + b), system_prompt="Answer with a number."),
                    self.config.task,
                )
