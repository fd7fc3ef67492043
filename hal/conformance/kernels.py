"""Family *kernels*: routing, its tables, and graphs."""

from equipoise.hal.conformance.graphs import ELSEWHERE, GRAPHS
from equipoise.hal.conformance.kernel_launches import FOLLOWING
from equipoise.hal.conformance.kernel_operands import OPERANDS
from equipoise.hal.conformance.kernel_rules import RULES
from equipoise.hal.conformance.kernel_tables import (
    COMMITTED,
    ONE_GENERATION,
    ONE_GENERATION_BY_RULE,
)
from equipoise.hal.conformance.kernel_values import SALTED, VALUES
from equipoise.hal.conformance.kernel_weights import TOGETHER
from equipoise.hal.conformance.large_kernels import SIZES

PROPERTIES = (
    VALUES,
    *SIZES,
    *OPERANDS,
    RULES,
    SALTED,
    COMMITTED,
    ONE_GENERATION,
    ONE_GENERATION_BY_RULE,
    TOGETHER,
    GRAPHS,
    ELSEWHERE,
    FOLLOWING,
)
