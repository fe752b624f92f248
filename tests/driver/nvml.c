/* libnvidia-ml.so.1 of the machine: a driver of generation 580 on eight GPUs behind NVSwitch, as machine.h has them.

   Like the real one it has every device file open as soon as a handle was asked for; it answers process lists under the
   driver's one lock, so that they wait while contexts are made; a call on a GPU in a teardown that hangs comes back when
   that has ended; and a GPU that is lost fails the event set of all. */
#include "machine.h"
#include "../driver_version.h"

enum { INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, UNINITIALIZED = 1, MISMATCH = 25 };
enum { RECOVERY_ACTION = 230, XID_EVENT = 8 };
#define GIB (1024LL * 1024 * 1024)

typedef struct { int gpu; } *Device;
static struct { int gpu; } devices[GPUS];
static int sessions;

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { uint32_t field, scope; int64_t at, latency; unsigned type, code; union { double d; unsigned u; uint64_t l; } value; } Field;
typedef struct { Device device; unsigned long long type, value; unsigned instance, compute; } Event;
typedef struct { unsigned char cluster[16]; unsigned status; uint32_t clique; unsigned state; } Fabric;
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status; uint32_t clique; unsigned state; uint32_t health; } Fabric2;

/* Begins every call that concerns a GPU. */
#define REACH(device) do { if (!sessions) return UNINITIALIZED; int code_ = reach((device)->gpu); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    attach();
    become_client();
    for (int gpu = 0; gpu < GPUS; gpu++) devices[gpu].gpu = gpu;
    sessions++;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (!sessions) return UNINITIALIZED;
    if (--sessions == 0) close_client();
    return SUCCESS;
}
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : "an error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "%s", driver_version()); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.%s", driver_version()); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return sessions ? SUCCESS : UNINITIALIZED; }

static int handle(int gpu, Device *device) {
    if (!sessions) return UNINITIALIZED;
    if (gpu < 0 || gpu >= GPUS) return INVALID;
    become_client();
    if (reach(gpu)) return LOST;
    open_device(gpu, 0);
    *device = (Device)&devices[gpu];
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) { return handle(index, device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *device) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x", &domain, &bus) != 2) return INVALID;
    return bus % 8 || bus < 0x10 || bus >= 0x10 + 8 * GPUS ? NOT_FOUND : handle((bus - 0x10) / 8, device);
}
/* It reads every GPU in turn, so it fails while any of them is lost. */
int nvmlDeviceGetHandleByUUID(const char *wanted, Device *device) {
    char uuid[64];
    for (int gpu = 0; gpu < GPUS; gpu++) {
        int code = handle(gpu, device);
        if (code) return code;
        uuid_of(gpu, uuid, sizeof uuid);
        if (!strcmp(uuid, wanted)) return SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Device device, unsigned *index) { REACH(device); *index = device->gpu; return SUCCESS; }
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) { REACH(device); uuid_of(device->gpu, text, size); return SUCCESS; }
int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info) {
    REACH(device);
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + 8 * device->gpu;
    bus_id_of(device->gpu, info->bus_id, sizeof info->bus_id);
    snprintf(info->legacy, sizeof info->legacy, "%s", info->bus_id + 4);
    return SUCCESS;
}
int nvmlDeviceGetName(Device device, char *text, unsigned size) { REACH(device); snprintf(text, size, "Stand-in H200"); return SUCCESS; }
int nvmlDeviceGetMinorNumber(Device device, unsigned *minor) { REACH(device); *minor = device->gpu ^ 1; return SUCCESS; }

/* Version 1 counts what the driver reserves as used. */
int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    REACH(device);
    memory->total = 80 * GIB; memory->used = GIB / 2 + used_bytes(device->gpu); memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory) {
    REACH(device);
    if (memory->version != 0x02000028) return MISMATCH;
    memory->total = 80 * GIB; memory->reserved = GIB / 2; memory->used = used_bytes(device->gpu);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

/* As in the driver: if the buffer is too small, it returns the required size. */
static int list(Device device, unsigned *count, Process *found, int kind) {
    unsigned listed = 0, contexts = 0;
    REACH(device);
    for (int i = 0; i < ENTRIES; i++) contexts += is_listed(&machine->entry[i]);
    hold_driver(machine->list_us + contexts * machine->list_each_us);
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &machine->entry[i];
        if (!is_listed(entry) || entry->kind != kind || entry->gpu != device->gpu) continue;
        if (found && listed < *count) found[listed] = (Process){entry->pid, entry->bytes, ~0u, ~0u};
        listed++;
    }
    int enough = listed <= *count;
    *count = listed;
    return enough ? SUCCESS : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *n, Process *found) { return list(device, n, found, COMPUTE); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *n, Process *found) { return list(device, n, found, GRAPHICS); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned *n, Process *found) { return list(device, n, found, -1); }
/* The existence of these two shows which struct the lists have. */
int nvmlDeviceGetConfComputeMemSizeInfo(Device device, void *sizes) { return NOT_SUPPORTED; }
int nvmlDeviceGetRunningProcessDetailList(Device device, void *all) { return NOT_SUPPORTED; }

int nvmlDeviceGetUtilizationRates(Device device, Utilization *busy) {
    REACH(device);
    *busy = (Utilization){used_bytes(device->gpu) ? 97 : 0, 0};
    return SUCCESS;
}
int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius) { REACH(device); *celsius = 40; return SUCCESS; }
int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) { REACH(device); *milliwatts = 120000; return SUCCESS; }
int nvmlDeviceGetComputeMode(Device device, unsigned *mode) { REACH(device); *mode = machine->gpu[device->gpu].mode; return SUCCESS; }
int nvmlDeviceSetComputeMode(Device device, unsigned mode) {
    REACH(device);
    if (geteuid()) return 4;
    machine->gpu[device->gpu].mode = mode;
    return SUCCESS;
}
int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    REACH(device);
    for (int i = 0; i < count; i++) {
        fields[i].code = fields[i].field == RECOVERY_ACTION ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 1;
        fields[i].value.u = machine->gpu[device->gpu].recovery;
    }
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    REACH(device);
    *corrected = *uncorrected = *pending = *failed = 0;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) { REACH(device); *current = *pending = 0; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(Device device, unsigned kind, unsigned counter, unsigned long long *errors) { REACH(device); *errors = 0; return SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) { REACH(device); *reasons = 1; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) { REACH(device); *reasons = 1; return SUCCESS; }
int nvmlDeviceGetPersistenceMode(Device device, unsigned *mode) { REACH(device); *mode = 1; return SUCCESS; }
int nvmlDeviceGetP2PStatus(Device device, Device other, unsigned what, unsigned *status) { REACH(device); REACH(other); *status = 0; return SUCCESS; }
int nvmlDeviceGetTopologyCommonAncestor(Device device, Device other, unsigned *level) { REACH(device); *level = device->gpu / 4 == other->gpu / 4 ? 40 : 50; return SUCCESS; }

int nvmlDeviceGetGpuFabricInfo(Device device, Fabric *fabric) {
    REACH(device);
    memset(fabric, 0, sizeof *fabric);
    fabric->state = machine->gpu[device->gpu].fabric;
    return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(Device device, Fabric2 *fabric) {
    REACH(device);
    if (fabric->version != 0x02000024) return MISMATCH;
    fabric->status = SUCCESS; fabric->clique = 0; fabric->health = 0;
    memset(fabric->cluster, 0, sizeof fabric->cluster);
    fabric->state = machine->gpu[device->gpu].fabric;
    return SUCCESS;
}

struct events { unsigned registered, seen; };
int nvmlEventSetCreate(struct events **set) {
    *set = calloc(1, sizeof **set);
    (*set)->seen = machine->xids;
    return SUCCESS;
}
int nvmlEventSetFree(struct events *set) { free(set); return SUCCESS; }
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, struct events *set) {
    REACH(device);
    set->registered |= 1u << device->gpu;
    return SUCCESS;
}
static int wait_for_event(struct events *set, Event *event, unsigned timeout_ms) {
    for (int64_t end_ns = now_ns() + timeout_ms * 1000000LL;; usleep(10000)) {
        for (int gpu = 0; gpu < GPUS; gpu++)
            if (set->registered & 1u << gpu && machine->gpu[gpu].lost) return LOST;
        while (set->seen < machine->xids) {
            int gpu = machine->xid[set->seen % XIDS].gpu, xid = machine->xid[set->seen % XIDS].xid;
            set->seen++;
            if (!(set->registered & 1u << gpu)) continue;
            *event = (Event){.device = (Device)&devices[gpu], .type = XID_EVENT, .value = xid};
            return SUCCESS;
        }
        if (now_ns() >= end_ns) return TIMEOUT;
    }
}
int nvmlEventSetWait_v2(struct events *set, Event *event, unsigned timeout_ms) { return wait_for_event(set, event, timeout_ms); }
int nvmlEventSetWait(struct events *set, Event *event, unsigned timeout_ms) { return wait_for_event(set, event, timeout_ms); }

/* NUMA ids belong to GPUs that are NUMA nodes, retired pages to older GPUs; third-party tools call the rest. */
#define NONE(call) int call(void) { return NOT_SUPPORTED; }
NONE(nvmlDeviceGetNumaNodeId) NONE(nvmlDeviceGetRetiredPagesPendingStatus) NONE(nvmlDeviceGetRetiredPages)
NONE(nvmlDeviceGetEncoderUtilization) NONE(nvmlDeviceGetDecoderUtilization) NONE(nvmlDeviceGetProcessUtilization)
NONE(nvmlDeviceGetFanSpeed) NONE(nvmlDeviceGetPowerManagementLimit) NONE(nvmlDeviceGetDisplayActive)
NONE(nvmlDeviceGetDriverModel) NONE(nvmlDeviceGetPerformanceState) NONE(nvmlDeviceGetVirtualizationMode)
