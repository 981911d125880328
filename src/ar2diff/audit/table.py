"""All claims by id: what is claimed, how it is derived again, and what would contradict it."""

from typing import NamedTuple


class Claim(NamedTuple):
    """One claim in words: `derived` says from what it is computed, `fails` what makes it fail."""

    title: str
    derived: str
    fails: str


CLAIMS: dict[str, Claim] = {
    "A1": Claim(
        "the base and the sources are the pinned ones",
        "SHA-256 and size of every file on disk; git blob or LFS pointer id against the repository's listing;"
        " where git objects are retained, up to the commit id. For a package, the file's own pinned SHA-256.",
        "A byte, a size, a receipt, a listing or a revision that differs; a file that nothing declares; a "
        "branch name where a commit id should stand.",
    ),
    "A2": Claim(
        "everything was downloaded here, before it was used",
        "The order of fetch, prepare and train events in the chain; status, URL and etag of each file.",
        "A stage that used what no earlier line fetched; a folder of files without a fetch event. A file "
        "without the server's answer is evidence missing.",
    ),
    "A3": Claim(
        "training started from the base's tensors, loaded strictly",
        "The tensor root of the base's files, as stored and as fp32, against the roots logged at each start "
        "of training, in run.json, in the checkpoints' states and in the evaluation; the name of the base "
        "against what was fetched, and the recipe against the training's settings. Where a stored adapter was put on "
        "the base first, these are the roots of RUN/start, and the evaluation's is the base's; there, every tensor "
        "against the base's but for the mask's row, that row and the files against the adapter's, configuration and "
        "tokenizer against the base's, the adapter's name against every recipe and, of a shipped one, its digests "
        "against this package's.",
        "Any root, name, digest or setting that differs; a list of missing or unexpected tensors that is not empty; "
        "an adapter of a recipe that was not put on the base, one that no recipe names, or a second one.",
    ),
    "A4": Claim(
        "nothing was unpickled",
        "The first bytes of every input, a stored adapter included, against an allow-list of formats; every other "
        "file of the run against the forms that pickles have.",
        "A pickle under any name, an archive that holds one, a file whose content is not what its name says.",
    ),
    "A5": Claim(
        "the data comes only from the declared sources",
        "Every source row is read or generated again, the recipe, template and tokenizer applied again, and "
        "the shard compared byte by byte.",
        "A token, a border, a row or a source file that differs; a receipt that is not the logged one.",
    ),
    "A6": Claim(
        "the declared filters held",
        "Declared filters are counted on the raw rows without the recipe's code; every count of dropped rows "
        "is made again.",
        "A count that differs, or a kept row that a declared filter excludes.",
    ),
    "A7": Claim(
        "evaluation sets were kept out",
        "The shard is decoded and searched for every item, whole, and in documents that no generator made for any "
        "run of eight words of one; evaluated problems must be among those kept out.",
        "A document that holds an item, or an evaluated problem that was not declared as kept out.",
    ),
    "A8": Claim(
        "decontamination ran with the declared rule",
        "The rule is applied again to every row; the lists of removed rows are compared.",
        "A row that was removed and should not have been, or the other way round; another rule, item count or text.",
    ),
    "A9": Claim(
        "each step consumed exactly the declared rows and noise",
        "Row ids of every step from (seed, epoch); inputs, positions and targets from the shard and the noise"
        " key, by digest, for a sample of steps that the ledger's digest draws, or with --deep for all.",
        "A step with other rows, another digest or block size; steps that are missing; a changed step log.",
    ),
    "A10": Claim(
        "resumes are continuous",
        "Root of the live weights and digest of the state at each resume, against the checkpoint saved before it.",
        "A root or digest that differs, a resume from a step that was never saved, newer checkpoints left out.",
    ),
    "A11": Claim(
        "the checkpoint is the one that was trained, and its documents follow from the ledger",
        "Tensor root, digest of the state and of every file of each checkpoint; DOWNLOADS.md and "
        "architecture.json rendered again and compared byte by byte; the root of a release in our own format; an "
        "averaged model against the mean of the checkpoints that it names.",
        "A root, digest or line that differs; a checkpoint that no training saved; a link in place of a file.",
    ),
    "A12": Claim(
        "the tensors are those of the model class",
        "Names, shapes and dtypes in the file against those that its config.json describes, both ways; the "
        "diffusion settings and those of an adapter against the training's; the model under an adapter against the "
        "base, but for the mask's row.",
        "A tensor too few, too many, or of another shape or dtype; other diffusion settings.",
    ),
    "A13": Claim(
        "the server runs those weights",
        "`/v1/provenance` of a server that the audit starts on the loopback, or of the one at --server: the root "
        "over its live tensors against the root of the files, computed here; the root that it prints.",
        "A root or diffusion settings that differ, a server that does not start or says nothing. Not claimed where "
        "no server is asked: more than 1 GB of weights without --deep, or --server none.",
    ),
    "A14": Claim(
        "decoding is iterative denoising",
        "Five probes on the engine: a token revealed later in a block moves the logits before it and, "
        "causally, does not; a later block changes nothing earlier; forward passes counted by a hook; the "
        "trace replays and equals the slow reference; with noise on a layer it diverges. On a server: masked counts "
        "fall to 0, replays are equal, fewer steps take fewer passes, what was revealed before moves what comes "
        "later, and the trace is that of the run's weights.",
        "Any probe that comes out otherwise, as it does for an autoregressive model, for an autoregressive server "
        "and for one that paints a trace over tokens decoded one by one.",
    ),
    "A15": Claim(
        "no credentials were used",
        "Names, never values, of credential-like variables and provider addresses in every process; names of "
        "the headers of every request for a file.",
        "A provider's address, or an authorization or cookie header. A credential-like variable that is set "
        "is evidence missing: it may not have been used, and nothing shows that.",
    ),
    "A16": Claim(
        "the code that ran is the code that is installed",
        "SHA-256 of every file of the package that the training process had imported, against this installation.",
        "A file that differs under the same version, or a list without files that every training needs. "
        "Another installed version is evidence missing.",
    ),
    "A17": Claim(
        "the evaluation's numbers follow from its answers",
        "Digests of report and answers; every answer graded again from its text; every count, interval, speed "
        "and difference made again; texts decoded again from tokens. Bits per token are as they were logged. "
        "Of an evaluation over a server, its own log: each answer's request, with digests "
        "of prompt, text and tokens, its mode, passes and model. Of lm-eval's tasks every sample graded and every "
        "figure averaged again, without its code.",
        "A digest, a grade, a count or a figure that differs, a problem left out or answered twice, an answer that "
        "the server's log does not hold once. A metric with no second grader is evidence missing.",
    ),
    "A18": Claim(
        "the ledger is untouched",
        "Every line's link to the one before; sequence and run id; Ed25519 signatures over size and head at "
        "each stage's end. The chain alone cannot see lines cut off the end.",
        "A broken link, a signature that does not hold, fewer lines than were signed, another key than the "
        "expected ones. Two keys that --key does not name are evidence missing.",
    ),
}

REPLAY_ID = "replay"
REPLAY = Claim(
    "training steps done again come out the same",
    "--replay N trains N steps again, from the newest checkpoint with as many steps after it or from where training "
    "began: inputs by digest, losses and gradient norm to one per cent, tensor roots at saved steps.",
    "Inputs that differ, or a loss that is another one. Other bits alone do not: another processor adds in another "
    "order.",
)


def find_claim(claim_id: str) -> Claim:
    """A claim or the replay, by id."""
    return REPLAY if claim_id == REPLAY_ID else CLAIMS[claim_id]
