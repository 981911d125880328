"""What an audit finds: for each claim a verdict, and for each comparison both values and where they come from."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ar2diff.hashing import canonical_json

Verdict = Literal["pass", "fail", "evidence missing", "not claimed"]
EXIT_CODES: dict[Verdict, int] = {"pass": 0, "not claimed": 0, "fail": 1, "evidence missing": 2}
USAGE_EXIT_CODE = 3
MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: what is claimed (and where), what was found (and where)."""

    what: str
    verdict: Verdict
    claimed: str
    claimed_in: str
    found: str
    found_in: str


@dataclass(slots=True, kw_only=True)
class ClaimResult:
    """A claim with its comparisons; the worst of them is its verdict. `level` names how strong the evidence is."""

    id: str
    title: str
    checks: list[Check] = field(default_factory=list)
    level: str = ""

    @property
    def verdict(self) -> Verdict:
        """Fail before evidence missing before pass; a claim without any comparison lacks evidence."""
        found = {check.verdict for check in self.checks}
        for verdict in ("fail", "evidence missing", "pass", "not claimed"):
            if verdict in found:
                return verdict
        return "evidence missing"

    def equal(self, what: str, claimed: object, found: object, *, claimed_in: str, found_in: str) -> bool:
        """Compare two values; the claim fails where they differ. Returns whether they are equal."""
        same = _is_same(claimed, found)
        self._add("pass" if same else "fail", what, claimed, claimed_in, found, found_in)
        return same

    def holds(
        self, what: str, holds: bool, *, claimed: object, claimed_in: str, found: object, found_in: str
    ) -> bool:
        """A comparison that is not plain equality."""
        self._add("pass" if holds else "fail", what, claimed, claimed_in, found, found_in)
        return holds

    def fail(self, what: str, found: object, *, found_in: str, claimed: object = "", claimed_in: str = "") -> None:
        """Something contradicts the claim."""
        self._add("fail", what, claimed, claimed_in, found, found_in)

    def missing(self, what: str, *, found_in: str, found: object = "absent") -> None:
        """What would prove the claim is not there."""
        self._add("evidence missing", what, "", "", found, found_in)

    def not_claimed(self, why: str, *, found_in: str) -> None:
        """The run makes no such claim."""
        self._add("not claimed", why, "", "", "nothing to check", found_in)

    def _add(
        self, verdict: Verdict, what: str, claimed: object, claimed_in: str, found: object, found_in: str
    ) -> None:
        check = Check(
            what=what,
            verdict=verdict,
            claimed=_show(claimed),
            claimed_in=claimed_in,
            found=_show(found),
            found_in=found_in,
        )
        self.checks.append(check)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        checks = [asdict(check) for check in self.checks]
        return {"id": self.id, "title": self.title, "verdict": self.verdict, "level": self.level, "checks": checks}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All claims of one run."""

    run_id: str
    ledger_size: int
    ledger_head: str
    deep: bool
    version: str
    claims: tuple[ClaimResult, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all claims."""
        found = {claim.verdict for claim in self.claims}
        return "fail" if "fail" in found else "evidence missing" if "evidence missing" in found else "pass"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a claim failed, 2 evidence missing."""
        return EXIT_CODES[self.verdict]

    def find(self, claim_id: str) -> ClaimResult:
        """The result of one claim."""
        return next(claim for claim in self.claims if claim.id == claim_id)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints: the same for the same run, wherever it lies."""
        return {
            "format": "ar2diff-audit-v1",
            "verdict": self.verdict,
            "run_id": self.run_id,
            "ledger": {"size": self.ledger_size, "head": self.ledger_head},
            "deep": self.deep,
            "ar2diff": self.version,
            "claims": [claim.as_json() for claim in self.claims],
        }


def _is_same(claimed: object, found: object) -> bool:
    # By canonical text: 1, 1.0 and True are equal in Python and different claims.
    try:
        return canonical_json(_plain(claimed)) == canonical_json(_plain(found))
    except (ValueError, TypeError):
        return type(claimed) is type(found) and claimed == found


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _show(value: object) -> str:
    if isinstance(value, list | tuple):
        text = ", ".join(map(_show, value)) or "none"
    else:
        text = value if isinstance(value, str) else "none" if value is None else repr(value)
    # Lone surrogates can stand in damaged files, and in no output.
    text = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
