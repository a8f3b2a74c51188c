"""docs/reference/kvpatch.openvex.json: vLLM's advisories on engines with kvpatch, for scanners."""

from __future__ import annotations

import json

from kvpatch.core.version import __version__
from tests.lab import advisories

from .tables import ROOT

PAGE = ROOT / "docs" / "reference" / "kvpatch.openvex.json"
_MITIGATION = (
    "With ENABLE_KVPATCH=true the patch transfer_params checks kv_transfer_params before vLLM uses "
    "them: the request fails or is computed, and the engine serves on. Without it vLLM is affected."
)
_CVES = ("CVE-2026-94622", "CVE-2026-94623", "CVE-2026-94626")


def page() -> str:
    """A statement for each advisory, on the releases where an engine with kvpatch was seen to live.

    OpenVEX 0.2.0: https://github.com/openvex/spec
    """
    played = json.loads(advisories.DATA.read_text())
    releases = [r for r, row in advisories.known().items() if row.kvpatch == advisories.SURVIVES]
    product = {
        "@id": f"pkg:pypi/kvpatch@{__version__}",
        "subcomponents": [{"@id": f"pkg:pypi/vllm@{release}"} for release in releases],
    }
    statements = [
        {
            "vulnerability": {"name": cve},
            "products": [product],
            "status": "not_affected",
            "justification": "inline_mitigations_already_exist",
            "impact_statement": _MITIGATION,
        }
        for cve in _CVES
    ]
    document = {
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": "urn:kvpatch:vex:kv-transfer-params",
        "author": "kvpatch's maintainers",
        "timestamp": f"{played['date']}T00:00:00Z",
        "version": 1,
        "statements": statements,
    }
    return f"{json.dumps(document, indent=1)}\n"
