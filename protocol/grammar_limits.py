"""What a grammar may cost. Both sides give these numbers to llguidance: who checks a grammar, and who follows it.

Invariant: a grammar that passed the check under these limits compiles again under them in the worker, with the same
work. All are counts of work, not times, so they mean the same on every machine. Those that are
not here are the library's own. Rejected: a flag for each, because nobody could say what to set it to.
"""

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_NUM_GRAMMAR_START_TOKENS = 16

LLGUIDANCE_LIMITS = {  # keyword arguments of `llguidance.LLParserLimits`
    "step_lexer_fuel": 100_000,  # of one mask: the worst is then some milliseconds
    "step_max_items": 25_000,  # the same, for the parser
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # their texts would quote what the model wrote
}
