"""What a test keeps of a request: what an API server would keep, and that nothing in it is missing or comes twice."""

from __future__ import annotations

from oracle_logprobs import expected_logprobs

from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from octavo.protocol.logprobs import TokenLogprobs


class RequestLog:
    """The command, the output so far, how it ended."""

    def __init__(self, command: AddRequest) -> None:
        self.command = command
        self.output_token_ids: list[int] = list(command.output_token_ids)
        self.finish_reason: FinishReason | None = None
        self.error: ErrorCode | None = None
        self.error_message = ""
        self.is_aborted = False
        self.beams: list[tuple[list[int], float]] = []
        self.num_cached_tokens: int | None = None
        self.logprobs: TokenLogprobs | None = None
        self.prompt_logprobs: TokenLogprobs | None = None

    def apply(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        assert not self.is_aborted, "output after an abort"
        assert output.first_index == len(self.output_token_ids), "a token was lost or came twice"
        self._apply_logprobs(output)
        self.output_token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.error_message = output.error_message
        self.beams = [(beam.token_ids, beam.score) for beam in output.beams]
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is FinishReason.STOP and not output.beams:
            assert output.stop_token_id == self.output_token_ids[-1]

    def _apply_logprobs(self, output: RequestOutput) -> None:
        is_asking = self.command.sampling_params.num_logprobs >= 0
        num_rows = 0 if output.logprobs is None else output.logprobs.num_rows
        assert num_rows == len(output.token_ids) * is_asking, "a token without logprobs, or logprobs that nobody asked"
        self.logprobs = joined(self.logprobs, output.logprobs)
        if output.prompt_logprobs is not None:
            assert self.output_token_ids == self.command.output_token_ids, "the prompt's logprobs come after a token"
            num_known = 0 if self.prompt_logprobs is None else self.prompt_logprobs.num_rows
            assert output.prompt_logprobs.first_position == 1 + num_known, "a prompt token was lost or came twice"
            self.prompt_logprobs = joined(self.prompt_logprobs, output.prompt_logprobs.rows)

    def check_logprobs(self, vocab_size: int) -> None:
        """At the end: each token that came, and each of the prompt, has the logprobs that it must have."""
        params, prompt = self.command.sampling_params, self.command.prompt_token_ids
        num_known = len(prompt) + len(self.command.output_token_ids)
        token_ids = [*prompt, *self.output_token_ids]
        if params.num_logprobs >= 0 and len(token_ids) > num_known:
            assert self.logprobs == expected_logprobs(token_ids, num_known, params.num_logprobs, vocab_size)
        if params.num_prompt_logprobs >= 0:
            num_to_come = len(token_ids) - num_known  # none: it was sent again when it had ended
            expected = expected_logprobs(prompt, 1, params.num_prompt_logprobs, vocab_size)
            assert self.prompt_logprobs == (expected if expected.num_rows and num_to_come else None)
            assert self.num_cached_tokens == 0


def joined(known: TokenLogprobs | None, more: TokenLogprobs | None) -> TokenLogprobs | None:
    return more if known is None else known if more is None else known.joined(more)
