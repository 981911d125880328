"""A view of a run that remembers what it was told."""

from dataclasses import dataclass, field

from ar2diff.sources.progress import SilentProgress
from ar2diff.train.metrics import SilentTrainProgress


@dataclass
class Watcher:
    """A view that remembers."""

    stages: list = field(default_factory=list)
    data_seen: set = field(default_factory=set)
    answers: int = 0
    download: SilentProgress = field(default_factory=SilentProgress)
    training: SilentTrainProgress = field(default_factory=SilentTrainProgress)

    def stage(self, title):
        self.stages.append(title)

    def data(self, source, done, total):
        self.data_seen.add(source)

    def evaluation(self, done, total, mode):
        self.answers = done
