"""One reply that is not what it should be never ends a run: it is dropped with a reason, or it does no harm."""

from dataclasses import replace
from typing import Any

import pytest

from laws.corruptions import CASES, FURTHER
from laws.test_laws import world
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.laws.replies import everybody, faults
from world import through


@pytest.mark.parametrize("case", [*CASES, *FURTHER])
def test_the_server_drops_each_corrupt_reply_with_a_reason_and_the_run_goes_on(case: str) -> None:
    crashed = faults((CASES | FURTHER)[case]())
    assert not crashed, "\n".join(crashed)


def test_what_belongs_to_a_modality_that_a_client_lacks_is_left_out() -> None:
    parts = assemble(everybody(world("fedavg")))
    fed, lost = parts.fed, dict[int, str]()
    stranger = next(c for c in fed.clients if fed.clients.owned(c) == ("a",))
    answer, fed.emit = fed.engine.answer, lambda kind, **facts: lost.update({facts["client"]: facts["reason"]})

    def more(request: Any, asked: Any, send: Any) -> Answer:
        got = answer(request, asked, send)
        singly = Replies(got.parts)
        whole = {client: singly[client] for client in singly}
        whole[stranger] = replace(whole[stranger], params=fed.template)
        return replace(got, parts=list(stacked(whole)))

    fed.engine.answer = more  # type: ignore[method-assign]
    through(parts, 1)
    assert lost == {stranger: "sent something of b, which it does not have"}
