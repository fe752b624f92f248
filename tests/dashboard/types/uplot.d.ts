import plot from "uplot";
export const uPlot: typeof plot;
