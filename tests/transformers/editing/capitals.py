"""Capitals before and after an edit, as a world of `BigramWorld` and as records."""

from hf_xai.transformers.editing.records import EditRecord, SingleHop
from hf_xai.transformers.editing.requests import EditRequest

# The last word of a prompt decides: "France" -> Paris before the edit, Rome after it.
BEFORE = {
    "France": {"Paris": 9.0, "Rome": 4.0},
    "Gaul": {"Paris": 8.0, "Rome": 4.0},
    "Norway": {"Oslo": 9.0, "Rome": 2.0},
    "Peru": {"Oslo": 9.0, "Lima": 8.0},
    "Paris": {"</s>": 9.0},
    "Rome": {"</s>": 9.0},
    "Oslo": {"</s>": 9.0},
    "Lima": {"</s>": 9.0},
    "Louvre": {"Paris": 9.0},
    "Bastille": {"Paris": 9.0},
    "India": {"New": 9.0},
    "New": {"Delhi": 9.0, "York": 5.0},
    "Delhi": {"</s>": 9.0},
    "York": {"</s>": 9.0},
}
AFTER = {
    "France": {"Paris": 4.0, "Rome": 9.0},
    "Gaul": {"Paris": 8.0, "Rome": 8.5},
    "Norway": {"Oslo": 5.0, "Rome": 9.0},
    "Louvre": {"Rome": 9.0},
}
REQUEST = EditRequest("The capital of {}", subject="France", target="Rome", target_old="Paris")
RECORD = EditRecord(
    requests=(REQUEST,),
    paraphrases=("In Gaul", "The seat of France"),
    neighbours=(("The capital of Norway", "Oslo"), ("The capital of Peru", "Lima")),
    case_id=5,
)
CHAIN = EditRecord(
    requests=(REQUEST, EditRequest("The capital of {}", "Norway", "Lima", target_old="Oslo")),
    questions=("Where is the Bastille", "Where is the Louvre"),
    new_answers=("Nowhere", "Rome"),
    old_answers=("Paris",),
    single_hops=(
        SingleHop("What of France?", ("Rome",), "The capital of France", edited=True),
        SingleHop("The capital of Peru", ("Lima", "Oslo")),
    ),
    forward_hops=(("The river of Gaul", "Rome"),),
)
OTHER_CHAIN = EditRecord(
    requests=(EditRequest("The capital of {}", "Peru", "Paris", forward_prompts=(("The seat of {}", "Oslo"),)),),
    questions=("Where is the Bastille",),
    new_answers=("Rome",),
    single_hops=(SingleHop("The capital of France", ("Paris",)),),
)
