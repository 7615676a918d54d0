
// ------------------------------------------------------------------ a step in time
// Lanes are rows, operations are bars. Timelines lie below each other on one axis, so that measured and simulated compare.
// A lane's bars are one path: what is thinner than a pixel is drawn as its neighbours' sum, so thousands of bars stay quick.

const TRACK = { height: 15, gap: 3, extra: 6, process: 24 };
const SIDE = { left: 76, right: 12, axis: 22 };

class Timelines {
    constructor(timelines) {
        this.timelines = timelines;
        this.endUs = Math.max(...timelines.map((one) => one.endUs), 1);
        this.view = { first: 0, last: this.endUs };
        this.rows = this.layOut();
        this.tip = element("div", { class: "tip quiet" });
        this.back = element("button", { type: "button", hidden: "" }, "whole step");
        this.picture = svg("svg", { role: "img", "aria-label": "Operations of a step by lane" });
    }

    /** Every track with its place. The further tracks of a lane, for operations in flight at once, are thin. */
    layOut() {
        const rows = [];
        let y = 0;
        for (const timeline of this.timelines) {
            timeline.y = y;
            y += TRACK.process;
            let lane = null;
            for (const track of timeline.tracks) {
                const isFirst = track.lane !== lane;
                lane = track.lane;
                y += isFirst ? TRACK.gap : 1;
                const height = isFirst ? TRACK.height : TRACK.extra;
                rows.push({ timeline, track, y, height, isFirst, kinds: this.kinds(timeline, track) });
                y += height;
            }
            y += 10;
        }
        this.height = y + SIDE.axis;
        return rows;
    }

    /** For each name, a number of its kind of operation: those that differ in unit, site or chunk only are of one kind. */
    kinds(timeline, track) {
        const kindOf = (name) => name.split(/ (?:unit|site|chunk|…) /)[0];
        const inLane = timeline.tracks.filter((one) => one.lane === track.lane).flatMap((one) => one.bars);
        const known = [...new Set(inLane.map((bar) => kindOf(timeline.names[bar[2]])))].sort();
        return timeline.names.map((name) => known.indexOf(kindOf(name)));
    }

    build() {
        onPointer(this.picture, {
            select: (from, to) => this.look(this.usAt(from), this.usAt(to)),
            all: () => this.look(0, this.endUs),
            hover: (x, y) => this.hover(x, y),
            leave: () => this.tell(null),
        });
        this.back.addEventListener("click", () => this.look(0, this.endUs));
        this.tell(null);
        return [element("div", { class: "bar" }, this.tip, this.back), this.picture];
    }

    look(first, last) {
        if (last - first < 1) return;
        this.view = { first, last };
        this.back.hidden = first === 0 && last === this.endUs;
        this.draw();
    }

    x(us) {
        return SIDE.left + ((us - this.view.first) / (this.view.last - this.view.first)) * (this.width - SIDE.left - SIDE.right);
    }

    usAt(x) {
        const share = (x - SIDE.left) / (this.width - SIDE.left - SIDE.right);
        return this.view.first + Math.min(1, Math.max(0, share)) * (this.view.last - this.view.first);
    }

    draw() {
        this.width = this.picture.parentElement.clientWidth - 28;
        this.picture.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
        this.picture.setAttribute("height", this.height);
        this.picture.replaceChildren();
        this.drawAxis();
        for (const timeline of this.timelines) {
            const text = `${timeline.name}, ${timeText(timeline.endUs)}`;
            this.picture.append(svg("text", { x: 0, y: timeline.y + 17, class: "process" }, text));
        }
        this.rows.forEach((row) => this.drawRow(row));
        this.under = svg("rect", { class: "under", rx: 1.5, visibility: "hidden" });
        this.picture.append(this.under);
    }

    drawAxis() {
        const [size, unit] = this.view.last - this.view.first >= 2e6 ? [1e6, " s"] : [1e3, " ms"];
        const bottom = this.height - SIDE.axis;
        for (const mark of ticks(this.view.first / size, this.view.last / size, Math.max(2, this.width / 120))) {
            const x = this.x(mark * size);
            const text = svg("text", { x, y: bottom + 15, "text-anchor": "middle" }, numberText(mark, 6) + unit);
            this.picture.append(line(x, 0, x, bottom, "grid"), text);
        }
    }

    drawRow({ timeline, track, y, height, isFirst, kinds }) {
        const inside = this.width - SIDE.left - SIDE.right;
        this.picture.append(svg("rect", { class: "row", x: SIDE.left, y, width: inside, height }));
        const name = data.lanes.find((lane) => lane.key === track.lane).name;
        if (isFirst) this.picture.append(svg("text", { x: SIDE.left - 8, y: y + height - 4, "text-anchor": "end" }, name));
        const paths = new Map();
        const texts = [];
        const ends = new Map();
        for (const bar of track.bars) {
            const [startUs, endUs, nameIndex] = bar;
            if (endUs < this.view.first || startUs > this.view.last) continue;
            const kind = Math.min(3, kinds[nameIndex]);
            const left = Math.max(SIDE.left, this.x(startUs), ends.get(kind) || 0);
            const right = Math.min(SIDE.left + inside, Math.max(this.x(endUs), left + 0.4));
            const width = right - left > 3 ? right - left - 0.6 : right - left;
            if (width <= 0) continue;
            ends.set(kind, right);
            paths.set(kind, `${paths.get(kind) || ""}M${left.toFixed(2)} ${y}h${width.toFixed(2)}v${height}h-${width.toFixed(2)}z`);
            const text = barName(timeline, bar);
            if (isFirst && width > text.length * 5.6 + 6) texts.push(svg("text", { x: left + 4, y: y + height - 4, class: "inside" }, text));
        }
        for (const [kind, d] of paths) this.picture.append(svg("path", { d, class: `bars c-${track.lane} shade-${kind}` }));
        this.picture.append(...texts);
    }

    hover(x, y) {
        const row = this.rows.find((one) => y >= one.y - 1 && y < one.y + one.height + 1);
        const us = this.usAt(x);
        const slack = (this.view.last - this.view.first) / (this.width || 1);
        const bar = row && x >= SIDE.left && row.track.bars.find((one) => one[0] - slack <= us && us <= one[1] + slack);
        this.tell(bar ? { row, bar } : null);
    }

    /** The name, start, duration and bytes of the bar under the pointer. */
    tell(found) {
        this.tip.replaceChildren();
        if (this.under) this.under.setAttribute("visibility", found ? "visible" : "hidden");
        if (!found) {
            this.tip.append("Point at an operation for its name, start, duration and bytes.");
            return;
        }
        const [startUs, endUs, , nbytes, numOps] = found.bar;
        const { timeline, y, height } = found.row;
        const parts = [numOps > 1 ? `${numOps} operations` : "", `from ${timeText(startUs)}`, `for ${timeText(endUs - startUs)}`];
        if (nbytes) parts.push(valueText("decimal", nbytes, 3), `${valueText("decimal", (nbytes / Math.max(endUs - startUs, 1)) * 1e6, 3)}/s`);
        this.tip.append(element("b", {}, `${timeline.name}: ${barName(timeline, found.bar)}`), ` ${parts.filter(Boolean).join(", ")}`);
        const [left, right] = [Math.max(SIDE.left, this.x(startUs)), Math.min(this.width - SIDE.right, this.x(endUs))];
        const box = { x: left, y: y - 0.5, width: Math.max(1.5, right - left), height: height + 1 };
        for (const [key, value] of Object.entries(box)) this.under.setAttribute(key, value);
    }
}

function barName(timeline, [, , nameIndex, , , ...numbers]) {
    return timeline.names[nameIndex].replace(/#/g, () => numbers.shift());
}

function timeText(us) {
    if (us >= 1e6) return `${numberText(us / 1e6, 4)} s`;
    return us >= 1e3 ? `${numberText(us / 1e3, 4)} ms` : `${numberText(us, 3)} µs`;
}

if (data.timelines.length) {
    const timelines = new Timelines(data.timelines);
    const home = document.getElementById("timeline");
    home.append(...timelines.build());
    onResize(home, () => timelines.draw());
}
