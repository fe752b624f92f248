/* A stand-in for libnvidia-ml.so.1, for tests of the NVML reader through the real binding, and of third-party tools.
 *
 * It has two GPUs, or as many as `count` says. Index 0 (bus 3B) supports everything and has processes; index 1 (bus 1A,
 * so first in PCI order) lacks memory, power, utilization and MPS list; others (bus 50, 51, ...) are like 0, but idle.
 *
 * Compile-time flags select another driver generation:
 *   BEFORE_510   no memory v2, no process lists v3, no MPS v3        LISTS_V1   only the unversioned process lists
 *   LONG_STRUCT  535.43 to 535.86: process lists v3 in a struct of 32 bytes, v2 in the old one
 *   PID=N        pid of the first process                            NO_FABRIC  does not know NVLink fabrics
 *   FABRIC_V1    the fabric only by its first call                   CUDA_14    temperature only by the newer call
 *
 * Faults are read at every call from the file named by STAND_IN_NVML, one per line:
 *   CALL INDEX CODE      this call fails on this GPU with this error; INDEX -1 is every GPU, CODE -1 hangs while the line is there
 *   count -1 N           number of GPUs        driver -1 VERSION   instead of the loaded module's
 *   action INDEX N       recovery action       mig INDEX 1         split by MIG
 *   remap INDEX 1|2      a row remap is pending (1), has failed (2)
 *   xid INDEX N          an Xid; each line is reported once, and lines are only added
 *   idle INDEX 1         it has no processes       gone INDEX 1      no processes, but their memory is still in use
 *   used_mib INDEX N      this much memory is in use
 *   odd INDEX 1          its memory, temperature, power and ECC counts have every bit set
 *   garbled INDEX 1      its name is not valid UTF-8
 *   fabric INDEX N       state of its NVLink fabric: 0 none, 1 not started, 2 in progress, 3 completed
 *   fabric_status INDEX N   the error with which that completed
 *   switched -1 1        NVLinks lead to an NVSwitch
 *   retired INDEX 1      memory pages wait to be retired (and it remaps no rows)
 *   raced INDEX N        each process list grows N times between the two calls that it takes
 *   waits -1 CODE        waiting for Xids fails with this; -1 hangs until the file says otherwise
 * A freed event set is written to the file's name with .freed appended.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "../driver_version.h"

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 16 };
#define GIB (1024ULL * 1024 * 1024)
#ifndef PID
#define PID 4194305
#endif

typedef struct { int index; } *Device;
static struct { int index; } devices[MAX_GPUS];

/* The value after `word index` in the file, 0 when it is not there. With `text` also as it is written. */
static int told(const char *word, int index, char *text) {
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], name[128], value[64];
    int found = 0, which;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %d %63s", name, &which, value) == 3 && !strcmp(name, word) && (which == index || which == -1)) {
            found = atoi(value);
            if (text) strcpy(text, value);
        }
    if (file) fclose(file);
    return found;
}
static int fault(const char *call, int index) {
    int code = told(call, index, NULL);
    for (; code == -1; code = told(call, index, NULL)) usleep(10000);
    return code;
}
#define FAULT(index) do { int code_ = fault(__func__, index); if (code_) return code_; } while (0)
#define DEVICE FAULT(device->index)
#define ODD told("odd", device->index, NULL)

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; } ProcessV1;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; unsigned long long protected_; } LongProcess;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { uint32_t field, scope; int64_t at, latency; unsigned type, code; union { double d; unsigned u; uint64_t l; } value; } Field;
typedef struct { Device device; unsigned long long type, value; unsigned instance, compute; } Event;

int nvmlInitWithFlags(unsigned flags) {
    printf("what a driver library prints must not get between the answers\n");
    fflush(stdout);
    for (int i = 0; i < MAX_GPUS; i++) devices[i].index = i;
    FAULT(-1);
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 18 ? "RM has detected an NVML/RM version mismatch." : "an error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    char version[64];
    FAULT(-1);
    strcpy(version, driver_version());
    told("driver", -1, version);
    snprintf(text, size, "%s", version);
    return SUCCESS;
}
static unsigned count(void) { int n = told("count", -1, NULL); return n ? n : 2; }
int nvmlDeviceGetCount_v2(unsigned *n) { FAULT(-1); *n = count(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= count()) return 2;
    FAULT(index);
    *device = (Device)&devices[index];
    return SUCCESS;
}
int nvmlDeviceGetIndex(Device device, unsigned *index) { DEVICE; *index = device->index; return SUCCESS; }
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    DEVICE;
    snprintf(text, size, "GPU-ABCDEF00-0000-0000-0000-00000000000%X", device->index);
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info) {
    DEVICE;
    memset(info, 0, sizeof *info);
    if (device->index == 0) strcpy(info->bus_id, "0000:3b:00.0");
    else sprintf(info->bus_id, "00000000:%02X:00.0", device->index == 1 ? 0x1A : 0x4E + device->index);
    return SUCCESS;
}
int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    DEVICE;
    snprintf(text, size, told("garbled", device->index, NULL) ? "\xff\xfe" : "Stand-in %d", device->index);
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(Device device, unsigned *minor) { DEVICE; *minor = device->index; return SUCCESS; }

static int poor(Device device) { return device->index == 1; }
static int idle(Device device) { return device->index > 0 || told("idle", device->index, NULL); }

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    DEVICE;
    if (poor(device)) return NOT_SUPPORTED;
    memory->total = 80 * GIB; memory->used = idle(device) ? GIB : 4 * GIB; memory->free = memory->total - memory->used;
    if (ODD) memory->used = memory->total = ~0ULL;
    return SUCCESS;
}
#ifndef BEFORE_510
int nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory) {
    DEVICE;
    if (memory->version != 0x02000028) return VERSION_MISMATCH;
    if (poor(device)) return NOT_SUPPORTED;
    memory->total = 80 * GIB; memory->reserved = 1 * GIB; memory->used = idle(device) ? 0 : 3 * GIB;
    if (told("used_mib", device->index, NULL)) memory->used = told("used_mib", device->index, NULL) * (GIB / 1024);
    memory->free = 79 * GIB - memory->used;
    if (ODD) memory->used = memory->total = ~0ULL;
    return SUCCESS;
}
#endif

static const Process compute[] = {{PID, 2 * GIB, ~0u, ~0u}, {4194306, ~0ULL, ~0u, ~0u}};
static const Process graphics[] = {{PID, 1, ~0u, ~0u}, {4194307, GIB, ~0u, ~0u}};

/* Two calls, the first with a count of 0 for the size; `stride` is the size of the caller's struct. */
static int list(Device device, unsigned *n, void *found, const Process *all, size_t stride) {
    static int raced;
    unsigned listed = idle(device) || told("gone", device->index, NULL) || !all ? 0 : 2;
    if (*n < listed) { *n = listed; return INSUFFICIENT_SIZE; }
    if (*n && told("raced", device->index, NULL)) {
        if (raced++ < told("raced", device->index, NULL)) { *n += 100; return INSUFFICIENT_SIZE; }
        raced = 0;
    }
    for (unsigned i = 0; i < listed; i++) {
        memset((char *)found + i * stride, 0, stride);
        memcpy((char *)found + i * stride, &all[i], stride < sizeof *all ? stride : sizeof *all);
    }
    *n = listed;
    return SUCCESS;
}
#define LISTS(version, struct_) \
    int nvmlDeviceGetComputeRunningProcesses##version(Device device, unsigned *n, struct_ *p) { \
        DEVICE; return list(device, n, p, compute, sizeof *p); } \
    int nvmlDeviceGetGraphicsRunningProcesses##version(Device device, unsigned *n, struct_ *p) { \
        DEVICE; return list(device, n, p, graphics, sizeof *p); } \
    int nvmlDeviceGetMPSComputeRunningProcesses##version(Device device, unsigned *n, struct_ *p) { \
        DEVICE; return poor(device) ? NOT_SUPPORTED : list(device, n, p, NULL, sizeof *p); }
LISTS(, ProcessV1)
#ifndef LISTS_V1
LISTS(_v2, Process)
#ifdef LONG_STRUCT
LISTS(_v3, LongProcess)
int nvmlDeviceGetConfComputeMemSizeInfo(Device device, void *sizes) { return NOT_SUPPORTED; }
#elif !defined BEFORE_510
LISTS(_v3, Process)
int nvmlDeviceGetConfComputeMemSizeInfo(Device device, void *sizes) { return NOT_SUPPORTED; }
int nvmlDeviceGetRunningProcessDetailList(Device device, void *all) { return NOT_SUPPORTED; }
#endif
#endif

int nvmlDeviceGetUtilizationRates(Device device, Utilization *busy) {
    DEVICE;
    busy->gpu = idle(device) ? 0 : 73;
    busy->memory = 0;
    return poor(device) ? NOT_SUPPORTED : SUCCESS;
}
#ifndef CUDA_14
int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius) { DEVICE; *celsius = ODD ? ~0u : 40u + device->index; return SUCCESS; }
#else
typedef struct { unsigned version, sensor; int celsius; } Temperature;
int nvmlDeviceGetTemperatureV(Device device, Temperature *temperature) {
    DEVICE;
    if (temperature->version != 0x0100000C) return VERSION_MISMATCH;
    temperature->celsius = 40 + device->index;
    return SUCCESS;
}
#endif
int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) {
    DEVICE;
    *milliwatts = ODD ? ~0u : 250500;
    return poor(device) ? NO_PERMISSION : SUCCESS;
}
static unsigned modes[MAX_GPUS] = {3, 2};
int nvmlDeviceGetComputeMode(Device device, unsigned *mode) { DEVICE; *mode = modes[device->index]; return SUCCESS; }
int nvmlDeviceSetComputeMode(Device device, unsigned mode) { DEVICE; modes[device->index] = mode; return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *device) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x", &domain, &bus) != 2) return 2;
    unsigned index = bus == 0x3B ? 0 : bus == 0x1A ? 1 : bus - 0x4E;
    if (index >= count()) return 6;
    FAULT(index);
    *device = (Device)&devices[index];
    return SUCCESS;
}
int nvmlDeviceGetFieldValues(Device device, int n, Field *fields) {
    DEVICE;
    for (int i = 0; i < n; i++) {
        fields[i].code = poor(device) ? NOT_SUPPORTED : SUCCESS;
        fields[i].type = 1;
        fields[i].value.u = told("action", device->index, NULL);
    }
    return SUCCESS;
}
int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    DEVICE;
    *current = *pending = told("mig", device->index, NULL);
    return poor(device) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    DEVICE;
    int remap = told("remap", device->index, NULL);
    *corrected = 2; *uncorrected = 1; *pending = remap == 1; *failed = remap == 2;
    return poor(device) || told("retired", device->index, NULL) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device device, unsigned *pending) {
    DEVICE;
    *pending = told("retired", device->index, NULL);
    return *pending ? SUCCESS : NOT_SUPPORTED;
}
#ifndef NO_FABRIC
typedef struct { unsigned char cluster[16]; unsigned status, clique, state; } Fabric;
typedef struct { unsigned version; Fabric fabric; unsigned health; } FabricV;
int nvmlDeviceGetGpuFabricInfo(Device device, Fabric *fabric) {
    DEVICE;
    memset(fabric, 0, sizeof *fabric);
    fabric->state = told("fabric", device->index, NULL);
    fabric->status = told("fabric_status", device->index, NULL);
    return SUCCESS;
}
#ifndef FABRIC_V1
int nvmlDeviceGetGpuFabricInfoV(Device device, FabricV *fabric) {
    DEVICE;
    if (fabric->version != 0x02000024 || sizeof *fabric != 0x24) return VERSION_MISMATCH;
    return nvmlDeviceGetGpuFabricInfo(device, &fabric->fabric);
}
#endif
#endif
int nvmlDeviceGetTotalEccErrors(Device device, unsigned kind, unsigned counter, unsigned long long *errors) {
    DEVICE;
    *errors = ODD ? ~0ULL : kind ? 0 : 7;
    return poor(device) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    DEVICE;
    *reasons = idle(device) ? 1 : 4;
    return poor(device) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetP2PStatus(Device device, Device other, unsigned what, unsigned *status) {
    DEVICE;
    *status = poor(device) || poor(other) ? 5 : 0;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) {
    DEVICE;
    *active = link != 1; /* link 1 has no bridge */
    return poor(device) ? NOT_SUPPORTED : link < 4 ? SUCCESS : 2;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, PciInfo *info) {
    DEVICE;
    memset(info, 0, sizeof *info);
    if (told("switched", -1, NULL) || link == 3) strcpy(info->bus_id, "00000000:D0:00.0"); /* an NVSwitch */
    else sprintf(info->bus_id, device->index ? "00000000:3B:00.0" : "00000000:50:00.0");
    return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(Device device, Device other, unsigned *level) { DEVICE; *level = 40; return SUCCESS; }

static unsigned registered;
int nvmlEventSetCreate(void **set) { FAULT(-1); registered = 0; *set = &registered; return SUCCESS; }
int nvmlEventSetFree(void *set) {
    char path[512];
    snprintf(path, sizeof path, "%s.freed", getenv("STAND_IN_NVML"));
    FILE *file = fopen(path, "a");
    if (file) { fputs("freed\n", file); fclose(file); }
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, void *set) { DEVICE; registered |= 1u << device->index; return SUCCESS; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
    static int known;
    const char *path = getenv("STAND_IN_NVML");
    char line[256];
    int index, xid, place = 0;
    while (told("waits", -1, NULL) == -1) usleep(10000);
    if (told("waits", -1, NULL)) return told("waits", -1, NULL);
    for (unsigned waited = 0;; waited += 10) {
        for (int i = 0; i < MAX_GPUS; i++)
            if (registered & 1u << i && told("nvmlDeviceGetHandleByIndex_v2", i, NULL) == 15) return 15;
        FILE *file = path ? fopen(path, "r") : NULL;
        for (place = 0; file && fgets(line, sizeof line, file);)
            if (sscanf(line, "xid %d %d", &index, &xid) == 2 && place++ == known) {
                known++;
                if (!(registered & 1u << index)) continue;
                fclose(file);
                memset(event, 0, sizeof *event);
                event->device = (Device)&devices[index]; event->type = 8; event->value = xid;
                return SUCCESS;
            }
        if (file) fclose(file);
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(10000);
    }
}

/* What nvitop asks beside; it says at length when a call is missing. */
#define NONE(call) int call(void) { return NOT_SUPPORTED; }
NONE(nvmlSystemGetCudaDriverVersion) NONE(nvmlDeviceGetEncoderUtilization) NONE(nvmlDeviceGetDecoderUtilization)
NONE(nvmlDeviceGetProcessUtilization) NONE(nvmlDeviceGetFanSpeed) NONE(nvmlDeviceGetPowerManagementLimit)
NONE(nvmlDeviceGetDisplayActive) NONE(nvmlDeviceGetDriverModel) NONE(nvmlDeviceGetPersistenceMode)
NONE(nvmlDeviceGetPerformanceState) NONE(nvmlDeviceGetNumaNodeId)
