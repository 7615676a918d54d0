
"use strict";
// The charts of a run, as SVG. All show the same stretch of steps and the same step under the pointer:
//
//     data    columns, one row a step       ->  CHARTS says which columns make a chart
//     view    first and last step in sight  ->  dragging sets it, a double click gives all of it back
//     cursor  row under the pointer         ->  every legend tells the numbers of that step

const data = JSON.parse(document.getElementById("data").textContent);
const columns = data.columns;
const steps = columns.step;
const view = { first: steps[0], last: steps[steps.length - 1] };
let cursor = null;

// ------------------------------------------------------------------ words and numbers

const scales = {
    plain: { base: 1, units: [""] },
    percent: { factor: 0.01, base: 1, units: ["%"], digits: 3 },
    seconds: { base: 1, units: [" s"] },
    binary: { base: 1024, units: [" B", " KiB", " MiB", " GiB", " TiB"] },
    decimal: { base: 1000, units: [" B", " kB", " MB", " GB", " TB", " PB"] },
};

/** The unit in which numbers up to `largest` are told: [its size, its name]. Small plain ones are told in powers of ten. */
function unitFor(kind, largest) {
    const { factor = 1, base, units } = scales[kind];
    if (kind === "plain" && largest > 0 && largest < 0.01) {
        const power = Math.floor(Math.log10(largest) + 1e-9);
        return [10 ** power, `e${power}`];
    }
    let power = 0;
    while (power + 1 < units.length && largest >= base ** (power + 1)) power++;
    return [factor * base ** power, units[power]];
}

function numberText(value, digits = 4) {
    const size = Math.abs(value);
    if (size >= 1e9) return value.toExponential(digits - 1).replace(/\.?0*e\+/, "e");
    const decimals = size > 0 ? digits - 1 - Math.floor(Math.log10(size)) : 0;
    return value.toLocaleString("en", { maximumFractionDigits: Math.min(Math.max(decimals, 0), 9) });
}

function valueText(kind, value, digits = scales[kind].digits ?? 4) {
    if (value === null || value === undefined) return "–";
    const [size, unit] = unitFor(kind, Math.abs(value));
    return numberText(value / size, digits) + unit;
}

/** Round numbers from `low` to `high`. */
function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((one) => one * power >= rough) || 10);
    const first = Math.ceil(low / step - 1e-9);
    const length = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
    return Array.from({ length }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function powersOfTen(low, high) {
    const found = [];
    const tens = Math.log10(high / low);
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const digit of tens < 1.5 ? [1, 2, 3, 5, 7] : tens < 3 ? [1, 3] : [1]) found.push(digit * 10 ** power);
    return found.filter((value) => value >= low && value <= high);
}

/** The last index whose value is not above `value`; -1 if there is none. */
function lastAt(sorted, value) {
    let low = 0;
    let high = sorted.length;
    while (low < high) {
        const middle = (low + high) >> 1;
        if (sorted[middle] <= value) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

// ------------------------------------------------------------------ elements

function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
}

function svg(name, attributes = {}, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
}

const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });

/** Draws now, and again whenever the width has changed. */
function onResize(target, draw) {
    let width = target.clientWidth;
    draw();
    addEventListener("resize", () => {
        if (width === target.clientWidth) return;
        width = target.clientWidth;
        draw();
    });
}

/** Calls `select(from, to)` with pixels after a drag, `all()` after a double click, and `hover(x, y)` in between. */
function onPointer(target, { select, all, hover, leave }) {
    let from = null;
    const mark = svg("rect", { class: "selection", y: 0, height: "100%", width: 0 });
    const place = (event) => {
        const box = target.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
    };
    target.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) {
            from = place(event)[0];
            target.setPointerCapture(event.pointerId);
        }
    });
    target.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        hover(x, y);
        if (from === null) return;
        mark.setAttribute("x", Math.min(from, x));
        mark.setAttribute("width", Math.abs(x - from));
        target.append(mark);
    });
    target.addEventListener("pointerup", (event) => {
        const to = place(event)[0];
        if (from !== null && Math.abs(to - from) > 5) select(Math.min(from, to), Math.max(from, to));
        from = null;
        mark.remove();
    });
    target.addEventListener("pointerleave", leave);
    target.addEventListener("dblclick", all);
}

// ------------------------------------------------------------------ what there is to see

const evaluations = data.evaluations.filter(([, loss]) => loss !== null);
const evaluated = { at: evaluations.map(([step]) => step), values: evaluations.map(([, loss]) => loss) };
const budget = (value) => value && { value, text: `budget ${valueText("binary", value)}` };

const clippedAt = columns.grad_norm && data.clipNorm ? steps.filter((_, row) => columns.grad_norm[row] > data.clipNorm) : [];
const MARKS = [
    ["clipped", clippedAt.length ? "gradient clipped" : ""],
    ["skipped", data.skippedAt.length ? "skipped: not finite" : ""],
    ["resumed", data.resumedAt.length ? "went back" : ""],
];

const CHARTS = [
    {
        title: "Loss", full: true, height: 280, marks: MARKS,
        series: [
            { key: "loss", name: "training", color: columns.smooth_loss ? "faint" : "main" },
            { key: "smooth_loss", name: "smoothed", color: "main" },
            { ...evaluated, name: "evaluation", color: "warn", dots: true },
        ],
    },
    {
        title: "Gradient norm", zero: true, limit: data.clipNorm && { value: data.clipNorm, text: `clipped to ${data.clipNorm}` },
        series: [{ key: "grad_norm", name: "before clipping", color: "main" }],
    },
    { title: "Learning rate", zero: true, series: [{ key: "learning_rate", name: "", color: "main" }] },
    { title: "Throughput", zero: true, series: [{ key: "tokens_per_s", name: "tokens/s", color: "main" }] },
    { title: "Step time", kind: "seconds", zero: true, series: [{ key: "step_s", name: "", color: "main" }] },
    {
        title: "Share of the step that each lane was busy", kind: "percent", full: true, bands: true,
        series: data.lanes.map(({ key, name }) => ({ key: `share of ${key}`, name, color: key })),
    },
    {
        title: "Speed of light", kind: "percent", zero: true, limit: { value: 1, text: "the busiest lane alone" },
        series: [{ key: "speed_of_light", name: "reached", color: "main" }],
    },
    {
        title: "Host memory", kind: "binary", zero: true, limit: budget(data.budgets.host),
        series: [
            { key: "peak_host_bytes", name: "lohan, at most", color: "main" },
            { key: "process_bytes", name: "whole process", color: "quiet" },
        ],
    },
    {
        title: "Device memory", kind: "binary", zero: true, limit: budget(data.budgets.device),
        series: [{ key: "peak_device_bytes", name: "at most", color: "main" }],
    },
    {
        title: "SSD traffic of all steps so far", kind: "decimal", zero: true,
        series: [
            { key: "total_read_bytes", name: "read", color: "ssd_read" },
            { key: "total_write_bytes", name: "written", color: "ssd_write" },
        ],
    },
];

// ------------------------------------------------------------------ one chart

const MARGIN = { left: 64, right: 12, top: 8, bottom: 22 };
const BAND = { height: 34, gap: 8 };

class Chart {
    constructor(spec) {
        this.spec = { kind: "plain", height: 190, ...spec };
        this.series = spec.series
            .map((one) => (one.key ? { ...one, at: steps, values: columns[one.key] } : one))
            .filter((one) => one.values && one.values.some((value) => value));
        this.isLog = false;
    }

    get isEmpty() {
        return this.series.length === 0;
    }

    build() {
        this.legends = this.series.map(() => element("b"));
        const legends = this.series.map((one, index) =>
            element("span", { class: "legend" }, element("i", { class: `c-${one.color}` }), `${one.name} `, this.legends[index]),
        );
        this.picture = svg("svg", { role: "img", "aria-label": this.spec.title });
        const marks = [["limit", this.spec.limit?.text], ...(this.spec.marks || [])].filter(([, text]) => text);
        const others = marks.map(([name, text]) => element("span", { class: "legend" }, element("i", { class: `mark ${name}` }), text));
        const bar = element("div", { class: "bar" }, element("h3", {}, this.spec.title), ...legends, ...others);
        if (steps.length > 1 && !this.spec.bands && this.series.every((one) => one.values.every((value) => value === null || value > 0)))
            bar.append(this.logButton());
        onPointer(this.picture, {
            select: (from, to) => look(this.stepAt(from), this.stepAt(to)),
            all: () => look(steps[0], steps[steps.length - 1]),
            hover: (x) => point(nearestRow(this.stepAt(x))),
            leave: () => point(null),
        });
        return element("figure", { class: this.spec.full ? "chart full" : "chart" }, bar, this.picture);
    }

    logButton() {
        const button = element("button", { type: "button", "aria-pressed": false, title: "logarithmic" }, "log");
        button.addEventListener("click", () => {
            this.isLog = !this.isLog;
            button.setAttribute("aria-pressed", this.isLog);
            this.draw();
        });
        return button;
    }

    x(step) {
        const share = view.last > view.first ? (step - view.first) / (view.last - view.first) : 0.5;
        return MARGIN.left + share * (this.width - MARGIN.left - MARGIN.right);
    }

    stepAt(x) {
        const share = (x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
        return view.first + Math.min(1, Math.max(0, share)) * (view.last - view.first);
    }

    draw() {
        this.width = this.picture.parentElement.clientWidth - 28;
        const inner = this.spec.bands ? this.series.length * (BAND.height + BAND.gap) : this.spec.height;
        this.height = inner + MARGIN.top + MARGIN.bottom;
        this.picture.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
        this.picture.setAttribute("height", this.height);
        this.picture.replaceChildren();
        this.drawSteps();
        if (this.spec.bands) this.drawBands();
        else this.drawPanel();
        this.pointer = svg("g");
        this.picture.append(this.pointer);
        this.point();
    }

    drawSteps() {
        const bottom = this.height - MARGIN.bottom;
        const whole = ticks(view.first, view.last, Math.max(2, this.width / 110)).filter(Number.isInteger);
        for (const step of view.last > view.first ? whole : [view.first]) {
            const anchor = this.x(step) > this.width - 28 ? { x: this.width, "text-anchor": "end" } : { x: this.x(step), "text-anchor": "middle" };
            const text = svg("text", { ...anchor, y: bottom + 15 }, step.toLocaleString("en"));
            this.picture.append(line(this.x(step), MARGIN.top, this.x(step), bottom, "grid"), text);
        }
        for (const step of data.resumedAt.filter(inSight))
            this.picture.append(line(this.x(step), MARGIN.top, this.x(step), bottom, "resumed"));
    }

    drawPanel() {
        const [low, high] = this.range();
        const bottom = this.height - MARGIN.bottom;
        const height = bottom - MARGIN.top;
        const place = this.isLog
            ? (value) => bottom - (height * Math.log(value / low)) / Math.log(high / low)
            : (value) => bottom - (height * (value - low)) / (high - low);
        const [size, unit] = unitFor(this.spec.kind, high);
        const marks = this.isLog
            ? powersOfTen(low / size, high / size)
            : ticks(low / size, high / size, height / 45);
        for (const mark of marks) {
            const y = place(mark * size);
            const text = svg("text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, mark === 0 ? "0" : numberText(mark) + unit);
            this.picture.append(line(MARGIN.left, y, this.width - MARGIN.right, y, "grid"), text);
        }
        this.places = this.series.map(() => place);
        const { limit } = this.spec;
        if (limit && limit.value >= low && limit.value <= high) {
            const y = place(limit.value);
            this.picture.append(line(MARGIN.left, y, this.width - MARGIN.right, y, "limit"));
        }
        this.series.forEach((one) => this.drawLine(one, place));
        if (this.spec.marks) this.drawMarks(bottom);
    }

    /** Lowest and highest value in sight, with some air; from zero where the chart wants it. */
    range() {
        const inside = [];
        for (const one of this.series)
            one.values.forEach((value, index) => {
                if (value !== null && inSight(one.at[index])) inside.push(value);
            });
        if (this.spec.limit) inside.push(this.spec.limit.value);
        let low = inside.reduce((least, value) => Math.min(least, value), Infinity);
        let high = inside.reduce((most, value) => Math.max(most, value), -Infinity);
        if (low === Infinity) [low, high] = [0, 1];
        if (this.isLog) return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
        if (this.spec.zero) return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
        const air = (high - low) * 0.06 || Math.abs(high) * 0.5 || 1;
        return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
    }

    drawBands() {
        const top = (index) => MARGIN.top + index * (BAND.height + BAND.gap);
        this.places = this.series.map((_, index) => (share) => top(index) + BAND.height * (1 - Math.min(1, share)));
        this.series.forEach((one, index) => {
            const bottom = top(index) + BAND.height;
            const right = this.width - MARGIN.right;
            const name = svg("text", { x: MARGIN.left - 7, y: bottom - BAND.height / 2 + 4, "text-anchor": "end" }, one.name);
            this.picture.append(line(MARGIN.left, top(index), right, top(index), "grid"), name);
            this.picture.append(line(MARGIN.left, bottom, right, bottom, "axis"));
            this.drawLine(one, this.places[index], bottom);
        });
    }

    /** A line with a gap where there is no value; a value with gaps on both sides is a dot. With `base`, filled down to it. */
    drawLine(one, place, base = null) {
        const [from, to] = [Math.max(0, lastAt(one.at, view.first) - 1), lastAt(one.at, view.last) + 1];
        const runs = [[]];
        for (let index = from; index <= Math.min(to, one.at.length - 1); index++) {
            const value = one.values[index];
            if (value === null) runs.push([]);
            else runs.at(-1).push([this.x(one.at[index]), place(value)]);
        }
        const lines = runs.filter((run) => run.length > 1);
        const path = (run) => run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
        const group = svg("svg", { ...this.hole(), class: `c-${one.color}` });
        if (base !== null) {
            const areas = lines.map((run) => `M${run[0][0]} ${base}L${path(run)}L${run.at(-1)[0]} ${base}Z`);
            group.append(svg("path", { d: areas.join(""), class: "area" }));
        }
        const isDense = to - from > this.width;
        group.append(svg("path", { d: lines.map((run) => `M${path(run)}`).join(""), class: isDense ? "series thin" : "series" }));
        for (const run of runs.filter((run) => run.length === 1 || (one.dots && to - from < this.width / 14)))
            for (const [cx, cy] of run) group.append(svg("circle", { cx, cy, r: 3.2, class: "dot" }));
        this.picture.append(group);
    }

    /** Where lines are seen: the plot, and a dot's width around it. */
    hole() {
        const [x, width] = [MARGIN.left - 5, Math.max(1, this.width - MARGIN.left - MARGIN.right + 10)];
        return { x, y: 0, width, height: this.height, viewBox: `${x} 0 ${width} ${this.height}` };
    }

    /** Below the loss: steps whose gradient was clipped, and steps that were skipped. */
    drawMarks(bottom) {
        const path = clippedAt.filter(inSight).map((step) => `M${this.x(step).toFixed(1)} ${bottom}v-6`);
        this.picture.append(svg("path", { d: path.join(""), class: "clipped" }));
        for (const x of data.skippedAt.filter(inSight).map((step) => this.x(step)))
            this.picture.append(line(x, bottom, x, bottom - 14, "skipped"));
    }

    /** The numbers of the step under the pointer, or of the last one. */
    point() {
        const step = steps[cursor === null ? steps.length - 1 : cursor];
        this.pointer.replaceChildren();
        if (cursor !== null && inSight(step))
            this.pointer.append(line(this.x(step), MARGIN.top, this.x(step), this.height - MARGIN.bottom, "cursor"));
        this.series.forEach((one, index) => {
            const row = lastAt(one.at, step);
            const value = row < 0 ? null : one.values[row];
            this.legends[index].textContent = valueText(this.spec.kind, value);
            if (cursor !== null && value !== null && inSight(one.at[row])) {
                const place = { cx: this.x(one.at[row]), cy: this.places[index](value), r: 3.6, class: `dot c-${one.color}` };
                this.pointer.append(svg("circle", place));
            }
        });
    }
}

// ------------------------------------------------------------------ all of them together

const charts = widened(CHARTS.map((spec) => new Chart(spec)).filter((chart) => !chart.isEmpty));
const where = element("span", { class: "quiet" });
const back = element("button", { type: "button", hidden: "" }, "all steps");

/** Charts stand in pairs; one that is left alone takes the whole width. */
function widened(charts) {
    let alone = null;
    for (const chart of [...charts, null]) {
        const isFull = chart === null || chart.spec.full;
        if (isFull && alone) alone.spec.full = true;
        alone = isFull || alone ? null : chart;
    }
    return charts;
}

function inSight(step) {
    return step >= view.first && step <= view.last;
}

function nearestRow(step) {
    const row = Math.max(0, lastAt(steps, step));
    return row + 1 < steps.length && steps[row + 1] - step < step - steps[row] ? row + 1 : row;
}

function point(row) {
    if (row === cursor) return;
    cursor = row;
    tellWhere();
    charts.forEach((chart) => chart.point());
}

/** Bring the steps from `first` to `last` in sight; less than one step is no stretch. */
function look(first, last) {
    if (last - first < 1 && steps.length > 1) return;
    [view.first, view.last] = [first, last];
    back.hidden = first === steps[0] && last === steps.at(-1);
    tellWhere();
    charts.forEach((chart) => chart.draw());
}

function tellWhere() {
    const count = (number) => number.toLocaleString("en");
    const thinned = `${count(data.numSteps)} steps, of which ${count(steps.length)} are drawn, the lowest and highest among them. `;
    const whose = cursor === null ? `the last step, ${count(steps.at(-1))}` : `step ${count(steps[cursor])}`;
    const hint = steps.length > 1 ? " Drag over a chart to zoom, double-click for all." : "";
    where.textContent = `${data.numSteps > steps.length ? thinned : ""}Numbers are those of ${whose}.${hint}`;
}

const place = document.getElementById("charts");
place.append(element("div", { class: "at" }, where, back), ...charts.map((chart) => chart.build()));
back.addEventListener("click", () => look(steps[0], steps.at(-1)));
onResize(place, () => charts.forEach((chart) => chart.draw()));
tellWhere();
