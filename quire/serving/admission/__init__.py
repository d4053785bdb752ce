"""Admission control, the fair queue and rate limits. No asyncio; the clock and the random source are arguments."""

from quire.serving.admission.control import AdmissionControl
from quire.serving.admission.fair_queue import CLASS_WEIGHTS, FairQueue
from quire.serving.admission.limits import OwnerLimits, TokenBucket
from quire.serving.admission.rates import ServiceRates
from quire.serving.admission.ticket import OUTPUT_TOKEN_WEIGHT, Ticket

__all__ = [
    "CLASS_WEIGHTS",
    "OUTPUT_TOKEN_WEIGHT",
    "AdmissionControl",
    "FairQueue",
    "OwnerLimits",
    "ServiceRates",
    "Ticket",
    "TokenBucket",
]
