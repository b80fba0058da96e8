"""`archipelago simulate`: estimate the cost of failures and links before a machine is rented."""

from __future__ import annotations

from archipelago.ops.commands import Verb, Verbs

VERBS: Verbs = {
    "plan": Verb("archipelago.ops.simulation.plan", "PlanOptions", "Choose M, H, P and codec for a run, on one page."),
    "tables": Verb("archipelago.ops.simulation.tables", "TablesOptions", "The paper's tables beside this model's."),
}
