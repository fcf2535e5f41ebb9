"""What README and docs show of results/ace.json."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from views.showing import Plot, Results, goals, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

SAME = "_same"
MEASURES = {
    "efficacy": "the fact",
    "first_hop": "first hop (named)",
    "second_hop": "second hop (implicit)",
    "all_hops": "least of the three",
}
CONTROLS = {"one_hop_controls": "other facts", "two_hop_controls": "other two-hop texts"}
EDITORS = {"memit": "MEMIT", "pmet": "PMET", "alphaedit": "AlphaEdit", "rome": "ROME", "emmet": "EMMET"}
PLACES = {
    "": "first layers",
    "early": "first layers",
    "query": "query layer",
    "first_query": "query layer",
    "first_value": "first value layer",
    "value": "value layers",
    "query_value": "query and value layers",
    "last": "last layer",
    "random": "other layers, drawn",
}
TITLES = {
    "ace": "**ACE**",
    "ace_pmet": "ACE, PMET's targets and spread [paper]",
    "ace_own_prompt": "ACE, own prompt in the value stage, too",
    "ace_each_its_change": "ACE, no change shared by the forward prompts",
    "ace_query_first": "ACE, query stage first [code]",
    "ace_no_forward": "ACE without forward prompts",
    "ace_no_multi_hop": "ACE without multi-hop prompts",
    "ace_located": "ACE, query layer of `locate`, too",
    "control_random_layers": "control: ACE on other layers, drawn",
    "control_swapped_roles": "control: query and value layers swapped",
    "control_last_layer": "control: last layer as value layer",
    "released": "released recipe, single-hop prompt",
    "released_same": "released recipe, ACE's prompts",
}


def summary(results: Results) -> str:
    """ACE beside the best of the others, in both experiments."""
    lines = []
    for title, name in (
        ("**ACE**", "ace"),
        ("best other editor, ACE's prompts", best(results, "all_hops", told=True)),
        ("MEMIT, single-hop prompt", "memit"),
        ("ROME, single-hop prompt", "rome_first_query"),
    ):
        row = of_method(results, name)
        lines.append([title, *(f"{row[measure]:.2f}" for measure in MEASURES), loss(row)])
    found = table(["Two-hop world: right answers", *MEASURES.values(), "other facts lost, points"], lines)
    real = [
        [title, *(shown(of_real(results, name), measure) for measure in REAL)]
        for title, name in (
            ("**ACE**", "ace"),
            ("MEMIT, ACE's layers and prompts", "memit_ace_layers_same"),
            ("MEMIT", "memit"),
        )
    ]
    second = table(["SmolLM2-135M: right answers", *REAL.values()], real)
    worlds = len(of_method(results, "ace")["by_edit"]["efficacy"])
    edits = len(of_method(results, "ace")["by_edit"]["efficacy"][0])
    return (
        f"{found}\n\n{second}\n\nMeans over {worlds} worlds with {edits} edits each, and over "
        f"{len(of_real(results, 'ace')['by_fact'])} facts; one edit at a time. {results['machine']['processor']}, "
        f"{results['date']}; `{results['command']}`."
    )


REAL = {
    "efficacy": "the fact",
    "paraphrase": "paraphrase",
    "specificity": "neighbours kept",
    "second_hop": "second hop (implicit)",
    "first_hop": "first hop (named)",
}


def of_method(results: Results, method: str, architecture: str = "llama") -> Row:
    (found,) = (
        row
        for row in results["rows"]
        if row.get("part") == "two_hop" and row["method"] == method and row["architecture"] == architecture
    )
    return found


def of_real(results: Results, method: str) -> Row:
    (found,) = (row for row in results["rows"] if row.get("part") == "real_model" and row["method"] == method)
    return found


def methods(results: Results, architecture: str = "llama") -> list[str]:
    return [
        row["method"]
        for row in results["rows"]
        if row.get("part") == "two_hop" and row["architecture"] == architecture
    ]


def is_rival(name: str) -> bool:
    return not name.startswith(("ace", "control", "released"))


def best(results: Results, measure: str, told: bool) -> str:
    """The other editor that does best."""
    names = [name for name in methods(results) if is_rival(name) and name.endswith(SAME) == told]
    return max(names, key=lambda name: of_method(results, name)[measure])


def title_of(name: str) -> str:
    """A method as people read it."""
    if name in TITLES:
        return TITLES[name]
    editor, _, place = name.removesuffix(SAME).partition("_")
    return f"{EDITORS[editor]}, {PLACES[place]}"


def loss(row: Row) -> str:
    """Points of accuracy that other facts lose, the worse of the two kinds."""
    found = [100 * (fmean(row["before"][f"{name}_before"]) - row[name]) for name in CONTROLS]
    return f"{max(found):.1f}"


def editors(told: bool) -> Any:
    """ACE and the others with its prompts, or with the single-hop prompt alone."""

    def rows(results: Results) -> str:
        names = [name for name in methods(results) if is_rival(name) and name.endswith(SAME) == told]
        names = ["ace", *names, "released_same" if told else "released"]
        return method_table(results, names)

    return rows


def controls(results: Results) -> str:
    """Variants of ACE and its negative controls."""
    return method_table(results, [name for name in methods(results) if name.startswith(("ace", "control"))])


def architectures(results: Results) -> str:
    """The other two kinds of layers."""
    lines = []
    kinds = {row["architecture"] for row in results["rows"] if row.get("part") == "two_hop"} - {"llama"}
    for kind in sorted(kinds):
        for name in methods(results, kind):
            title, *cells = line_of(of_method(results, name, kind))
            lines.append([kind, title + (", ACE's prompts" if name.endswith(SAME) else ""), *cells])
    return table(["Model", *HEADS], lines)


HEADS = ["Editor", "layers", *MEASURES.values(), "lost, points", "s an edit"]


def method_table(results: Results, names: Sequence[str]) -> str:
    return table(HEADS, [line_of(of_method(results, name)) for name in names])


def line_of(row: Row) -> list[str]:
    layers = ", then ".join(" ".join(map(str, stage)) for stage in row["layers"])
    shares = [f"{row[measure]:.2f} ± {standard_error(row, measure):.2f}" for measure in MEASURES]
    return [title_of(row["method"]), layers, *shares, loss(row), f"{row['seconds']:.2f}"]


def standard_error(row: Row, measure: str) -> float:
    """Of a mean over all edits of all worlds."""
    hops = [name for name in MEASURES if name != "all_hops"] if measure == "all_hops" else [measure]
    worlds_of = [[value for world in row["by_edit"][hop] for value in world] for hop in hops]
    values = [min(edit) for edit in zip(*worlds_of, strict=True)]
    return stdev(values) / len(values) ** 0.5


def worlds(results: Results) -> str:
    """The trained models, and what `locate` found in each."""
    lines = [
        [
            row["architecture"],
            row["seed"],
            f"{row['one_hop']:.3f}",
            f"{row['two_hop_held_out']:.3f}",
            row["located_query"],
            row["located_value"],
            " ".join(f"{score:.2f}" for score in row["value_score"]),
            " ".join(f"{score:.2f}" for score in row["query_score"]),
        ]
        for row in results["rows"]
        if row.get("part") == "two_hop_world"
    ]
    heads = ["Model", "seed", "one hop", "held-out two hops", "query", "value", "value scores", "query scores"]
    return table(heads, lines)


REAL_TITLES = {
    "ace": "**ACE**",
    "ace_pmet": "ACE, PMET's targets and spread",
    "ace_early_query": "ACE, early query layers",
    "memit_ace_layers_same": "MEMIT, ACE's layers and prompts",
}


def real_model(results: Results) -> str:
    """Every editor on the facts of SmolLM2."""
    rows = [row for row in results["rows"] if row.get("part") == "real_model"]
    lines = []
    for row in rows:
        name = row["method"]
        other = EDITORS.get(name.removesuffix(SAME), name) + (", ACE's prompts" if name.endswith(SAME) else "")
        lines.append(
            [REAL_TITLES.get(name, other), *(shown(row, measure) for measure in REAL), f"{row['seconds']:.1f}"]
        )
    counts = [f"{title} ({rows[0][measure]['facts']})" for measure, title in REAL.items()]
    (setting,) = (row for row in results["rows"] if row.get("part") == "real_model_setting")
    text = table(["Editor", *counts, "s an edit"], lines)
    return (
        f"{text}\n\nShare of questions whose whole answer is the likeliest (in brackets: is likelier than the other "
        f"answer), mean over the facts that have such questions, whose number stands in the head. Query layers "
        f"{setting['query_layers']}, value layers {setting['value_layers']}; statistics of "
        f"{setting['statistics']['tokens']:,} tokens."
    )


def shown(row: Row, measure: str) -> str:
    if measure not in row:
        return ""
    return f"{row[measure]['exact']:.2f} ({row[measure]['likelier']:.2f})"


def cost(results: Results) -> str:
    """Seconds, and what is saved."""
    rows = {row["what"]: row for row in results["rows"] if row.get("part") == "cost"}
    batch, small, solve = rows["batch"], rows["two_hop"], rows["solve"]
    lines = [
        [f"{batch['edits']} MEMIT edits, SmolLM2", seconds(batch["one_by_one"]), seconds(batch["batch"])],
        [f"{small['edits']} MEMIT edits, two-hop Llama", seconds(small["one_by_one"]), seconds(small["batch"])],
    ]
    lines += [
        [f"targets of one {title} edit, SmolLM2", seconds(row["bottom"]), seconds(row["prefix"])]
        for title, row in (("ACE", rows["prefix"]["ace"]), ("MEMIT", rows["prefix"]["memit"]))
    ]
    lines.append([f"solve of one edit, N = {solve['size']}", f"{solve['solve_each']:.3f} s", f"{solve['next']:.4f} s"])
    for title, found in (("SmolLM2", rows["attribution"]), ("two-hop Llama", small["attribution"])):
        lines.append(
            [
                f"value neurons of {found['prompts']} prompts, {title}",
                f"{found['seconds']['exact']:.1f} s, {found['read_outs']['exact']:,} read-outs",
                f"{found['seconds']['two_stage']:.1f} s, {found['read_outs']['two_stage']:,} read-outs, recall of the "
                f"top 30: {fmean(found['recall30']):.3f}",
            ]
        )
    return table(["Work", "one by one / from the bottom / exact", "hf_xai"], lines)


def seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s"


def hop_points(results: Results) -> dict[str, list[Any]]:
    """First and second hop of every editor that is given ACE's prompts."""
    names = ["ace", *(name for name in methods(results) if is_rival(name) and name.endswith(SAME))]
    rows = [of_method(results, name) for name in names]
    return {
        "names": names,
        "first_hop": [row["first_hop"] for row in rows],
        "second_hop": [row["second_hop"] for row in rows],
    }


def draw_hops(points: Mapping[str, list[Any]]) -> "Figure":
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.0, 4.0), layout="constrained")
    places = [title_of(name).partition(", ")[2] for name in points["names"]]
    for number, place in enumerate(dict.fromkeys(place for place in places if place)):
        chosen = [index for index, found in enumerate(places) if found == place]
        first, second = ([points[hop][index] for index in chosen] for hop in ("first_hop", "second_hop"))
        ax.plot(first, second, "osD^vP*X<>"[number % 10], label=place, alpha=0.7)
    ours = points["names"].index("ace")
    ax.plot(points["first_hop"][ours], points["second_hop"][ours], "*", color="C3", markersize=16, label="ACE")
    ax.set(xlabel="first hop (subject named)", ylabel="second hop (subject implicit)")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.05))
    ax.legend(title="MEMIT, PMET, AlphaEdit, EMMET on", fontsize=8, title_fontsize=8)
    return figure


TABLES = {
    "": summary,
    "same_prompts": editors(told=True),
    "single_hop": editors(told=False),
    "controls": controls,
    "architectures": architectures,
    "worlds": worlds,
    "real_model": real_model,
    "cost": cost,
    "bars": goals,
}
PLOTS = {"docs/assets/ace-hops.png": Plot(hop_points, draw_hops)}
