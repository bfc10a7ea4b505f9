"""The plots of a page, drawn by Bokeh, which carries its own script: hover and zoom without a server or a network.

Colours stay readable on light and dark paper: the plots have no background of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, HoverTool, LogAxis, LogScale, Range1d
from bokeh.models.annotations import BoxAnnotation, Label, Span
from bokeh.plotting import figure

from deephoyer.lab.report.run_facts import RunFacts

BLUE, ORANGE, GREY, RED, GREEN = "#3b8ec2", "#d98f00", "#7d7d7d", "#d55e00", "#0f9d76"
CYCLE = (BLUE, RED, GREEN, "#cc79a7", ORANGE, "#56b4e9")
TOOLS = "pan,wheel_zoom,box_zoom,reset,save"


def _figure(name: str, **settings: Any) -> Any:
    plot = figure(
        name=name, tools=TOOLS, sizing_mode="stretch_width", toolbar_location="right", output_backend="svg", **settings
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.grid.grid_line_color = GREY
    plot.grid.grid_line_alpha = 0.25
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GREY
        axis.axis_label_text_font_style = "normal"
    return plot


def _legend(plot: Any, place: str = "top_right") -> None:
    if plot.legend:
        plot.legend.location = place
        plot.legend.background_fill_alpha = 0.0
        plot.legend.border_line_alpha = 0.0
        plot.legend.label_text_color = GREY
        plot.legend.click_policy = "hide"


def epochs(facts: RunFacts) -> Any:
    """Accuracy over all epochs, the stages shaded."""
    key = "held_out" if any("held_out" in line for line in facts.metrics) else "test"
    lines = [(place, line) for place, line in enumerate(facts.metrics, 1) if key in line]
    plot = _figure("epochs", height=280, x_axis_label="epoch", y_axis_label=f"{key.replace('_', '-')} accuracy, %")
    source = ColumnDataSource(
        {
            "epoch": [place for place, _ in lines],
            "accuracy": [100 * line[key] for _, line in lines],
            "loss": [line.get("loss") for _, line in lines],
            "stage": [line["stage"] for _, line in lines],
        }
    )
    drawn = plot.line("epoch", "accuracy", source=source, color=BLUE, line_width=2)
    plot.scatter("epoch", "accuracy", source=source, color=BLUE, size=4)
    tips = [("stage", "@stage"), ("epoch", "@epoch"), ("accuracy", "@accuracy{0.00} %"), ("loss", "@loss{0.0000}")]
    plot.add_tools(HoverTool(renderers=[drawn], mode="vline", tooltips=tips))
    _shade(plot, facts)
    return plot


def pressure(facts: RunFacts) -> Any | None:
    """Effective density and strength while regularizing; None for a run that did not."""
    lines = [(place, line) for place, line in enumerate(facts.metrics, 1) if "effective_density" in line]
    if not lines:
        return None
    plot = _figure("pressure", height=240, x_axis_label="epoch", y_axis_label="effective density, %")
    places = [place for place, _ in lines]
    shares = [100 * line["effective_density"] for _, line in lines]
    drawn = plot.line(places, shares, color=GREEN, line_width=2, legend_label="effective density")
    plot.scatter(places, shares, color=GREEN, size=4, legend_label="effective density")
    plot.add_tools(HoverTool(renderers=[drawn], mode="vline", tooltips=[("epoch", "$x{0}"), ("density", "$y{0.00} %")]))
    strengths = [(place, line["strength"]) for place, line in lines if isinstance(line.get("strength"), int | float)]
    positive = [value for _, value in strengths if value > 0]
    if positive:
        plot.extra_y_scales = {"strength": LogScale()}
        plot.extra_y_ranges = {"strength": Range1d(min(positive) / 2, max(positive) * 2)}
        axis = LogAxis(y_range_name="strength", axis_label="strength")
        for part in ("axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color"):
            setattr(axis, part, GREY)
        plot.add_layout(axis, "right")
        x, y = zip(*strengths, strict=True)
        plot.line(
            x, y, y_range_name="strength", color=ORANGE, line_dash="dashed", line_width=2, legend_label="strength"
        )
    _shade(plot, facts)
    _legend(plot, "top_right")
    return plot


def _shade(plot: Any, facts: RunFacts) -> None:
    for number, (title, first, last) in enumerate(facts.stages()):
        shade = BoxAnnotation(
            left=first - 0.5,
            right=last + 0.5,
            fill_color=GREY,
            fill_alpha=0.10 if number % 2 else 0.0,
            level="underlay",
        )
        plot.add_layout(shade)
        if number:
            plot.add_layout(Span(location=first - 0.5, dimension="height", line_color=GREY, line_dash="dotted"))
        # The names stand in the page's own text as well, for those who don't see the plot.
        plot.add_layout(Label(x=first - 0.4, y=4, y_units="screen", text=title, text_color=GREY, text_font_size="9pt"))


def structure(layers: Sequence[Mapping[str, Any]]) -> Any:
    """For each layer the filters it had and has: what was removed where."""
    names = [row["name"] for row in layers][::-1]
    left = [row["live_filters"] if row["filters_left"] is None else row["filters_left"] for row in layers][::-1]
    had = [row["filters"] for row in layers][::-1]
    source = ColumnDataSource(
        {"name": names, "left": left, "gone": [h - k for h, k in zip(had, left, strict=True)], "had": had}
    )
    plot = _figure(
        "structure", height=max(120, 18 * len(names) + 60), y_range=names, x_axis_label="filters, or neurons"
    )
    # No legend, which would lie on the bars: the caption says which colour is which.
    colours = {"color": [BLUE, GREY], "alpha": [1.0, 0.3]}
    drawn = plot.hbar_stack(["left", "gone"], y="name", source=source, height=0.7, **colours)
    tips = [("layer", "@name"), ("left", "@left of @had")]
    plot.add_tools(HoverTool(renderers=list(drawn), tooltips=tips))
    plot.x_range.start = 0
    return plot


def magnitudes(entries: Sequence[Mapping[str, Any]]) -> Any:
    """The histogram of one layer; the page's own list puts another one's numbers into it."""
    first = entries[0]
    source = ColumnDataSource(bars(first), name="magnitude bars")
    plot = _figure("magnitudes", height=260, x_axis_label="group magnitude (l2)", y_axis_label="groups")
    plot.quad("left", "right", "stayed_top", 0, source=source, color=BLUE, legend_label="stayed")
    drawn = plot.quad(
        "left", "right", "top", "stayed_top", source=source, color=GREY, alpha=0.45, legend_label="pruned"
    )
    tips = [("magnitude", "10^(@left{0.00}) to 10^(@right{0.00})"), ("stayed", "@stayed"), ("pruned", "@went")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips, mode="vline"))
    line = Span(dimension="height", line_color=RED, line_dash="dashed", line_width=2, name="threshold")
    line.location = first["threshold"]
    line.visible = first["threshold"] is not None
    plot.add_layout(line)
    plot.xaxis.formatter = CustomJSTickFormatter(code="return '10^' + tick.toFixed(1).replace(/\\.0$/, '')")
    _legend(plot, "top_left")
    return plot


def bars(entry: Mapping[str, Any]) -> dict[str, list[float]]:
    """What the histogram's bars are drawn from."""
    edges, stayed, went = entry["edges"], entry["stayed"], entry["went"]
    top = [s + w for s, w in zip(stayed, went, strict=True)]
    return {"left": edges[:-1], "right": edges[1:], "stayed": stayed, "went": went, "stayed_top": stayed, "top": top}


def compared(runs: Sequence[RunFacts]) -> Any:
    """Accuracy over the epochs of several runs."""
    plot = _figure("compared", height=320, x_axis_label="epoch", y_axis_label="accuracy, %")
    for run, colour in zip(runs, CYCLE * len(runs), strict=False):
        lines = [(p, line.get("held_out", line.get("test"))) for p, line in enumerate(run.metrics, 1)]
        known = [(p, 100 * a) for p, a in lines if a is not None]
        if known:
            x, y = zip(*known, strict=True)
            plot.line(x, y, color=colour, line_width=2, legend_label=run.name)
    plot.add_tools(HoverTool(tooltips=[("epoch", "$x{0}"), ("accuracy", "$y{0.00} %")]))
    _legend(plot, "bottom_right")
    return plot


def points(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Every seed of every record as a point: accuracy against size. The page's filters choose which are shown."""
    source = ColumnDataSource({key: [row[key] for row in rows] for key in rows[0]}, name="records")
    plot = _figure("points", height=420, x_axis_type="log", x_axis_label="size", y_axis_label="test accuracy, %")
    drawn = plot.scatter("size", "accuracy", source=source, size=8, alpha=0.75, color="colour")
    tips = [
        ("", "@method"),
        ("command", "@command"),
        ("accuracy", "@accuracy{0.00} %"),
        ("size", "@size{0,0}"),
        ("seed", "@seed"),
    ]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    return plot
