// What Grafana's own schema says of a dashboard, as JSON has it: an enum is there the text or the number of its value.
import type { Dashboard } from "@grafana/schema";

type Json<T> = T extends string ? `${T}` : T extends (infer Item)[] ? Json<Item>[] : T extends object ? { [Key in keyof T]: Json<T[Key]> } : T;
export const dashboard: Json<Dashboard> =
