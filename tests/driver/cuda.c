/* libcuda.so.1 of the machine: contexts of real processes on the GPUs of machine.h.

   Like the real one, cuInit opens and maps the device file of each GPU that the mask shows, of all without a mask, and
   fails with 802 until the fabric is up. A context takes a tenth of a second, in calls under the driver's lock, is listed, and has
   its memory until the last process that has inherited it is gone. In a forked child every call fails.

   A context on a GPU that another lease's process still has anything of is written into `violations`: the machine is
   the witness that no two leases ever had a GPU at once. */
#include "machine.h"

enum { NOT_INITIALIZED = 3, DEVICES_BUSY = 46, NO_DEVICE = 100, INVALID_DEVICE = 101, OUT_OF_MEMORY = 2, UNKNOWN = 999, NOT_READY = 802 };
enum { CONTEXT_BYTES = 512 * 1024 * 1024, CONTEXT_CALLS = 10, EXCLUSIVE_PROCESS = 3, PROHIBITED = 2 };

static int shown[GPUS], shown_count, current = -1, contexts[GPUS];
static pid_t initialised_by;

static int position_of(const char *word) {
    char uuid[64];
    for (int gpu = 0, index = 0; gpu < GPUS; gpu++) {
        if (machine->gpu[gpu].lost) continue;  /* CUDA leaves it out, and the following ordinals move up */
        uuid_of(gpu, uuid, sizeof uuid);
        if (!strncmp(word, "GPU-", 4) ? !strncmp(word, uuid, strlen(word)) : atoi(word) == index) return gpu;
        index++;
    }
    return -1;
}
static void apply_mask(void) {
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    char text[1024], *rest = text, *word;
    shown_count = 0;
    snprintf(text, sizeof text, "%s", mask ? mask : "0,1,2,3,4,5,6,7");
    while ((word = strsep(&rest, ",")) && *word) {
        int gpu = position_of(word);
        if (gpu < 0) return;
        shown[shown_count++] = gpu;
    }
}

int cuInit(unsigned flags) {
    if (initialised_by) return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED;
    attach();
    apply_mask();
    if (!shown_count) return NO_DEVICE;
    for (int i = 0; i < shown_count; i++)
        if (machine->gpu[shown[i]].fabric == 1 || machine->gpu[shown[i]].fabric == 2) return NOT_READY;
    become_client();
    for (int i = 0; i < shown_count; i++) {
        if (reach(shown[i])) return UNKNOWN;
        open_device(shown[i], 1);
    }
    memset(contexts, -1, sizeof contexts);
    initialised_by = getpid();
    return SUCCESS;
}

/* Begins every call that names a device by its ordinal. */
#define DEVICE(ordinal) do { \
    if (initialised_by != getpid()) return NOT_INITIALIZED; \
    if ((ordinal) < 0 || (ordinal) >= shown_count) return INVALID_DEVICE; } while (0)

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) {
    if (initialised_by != getpid()) return NOT_INITIALIZED;
    *count = shown_count;
    return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) { DEVICE(ordinal); *device = ordinal; return SUCCESS; }
int cuDeviceGetUuid(unsigned char *bytes, int device) {
    char uuid[64], *at = uuid + 4;
    DEVICE(device);
    uuid_of(shown[device], uuid, sizeof uuid);
    for (int i = 0; i < 16; i++, at += 2) {
        unsigned byte;
        if (*at == '-') at++;
        sscanf(at, "%2x", &byte);
        bytes[i] = byte;
    }
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) { return cuDeviceGetUuid(bytes, device); }
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    char bus_id[32];
    DEVICE(device);
    bus_id_of(shown[device], bus_id, sizeof bus_id);
    snprintf(text, length, "%s", bus_id + 4);  /* CUDA writes the domain with four digits */
    return SUCCESS;
}
int cuDeviceGetName(char *text, int length, int device) { DEVICE(device); snprintf(text, length, "Stand-in H200"); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { DEVICE(device); *bytes = 80ULL << 30; return SUCCESS; }

/* Another lease's process on the GPU; -1 if there is none. Processes of the same lease do not count. */
static int stranger_on(int gpu, int any) {
    const char *lease = getenv("GPULEASE_LEASE_ID");
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &machine->entry[i];
        if (entry->state == FREE || entry->kind == CLIENT || entry->gpu != gpu || entry->pid == getpid()) continue;
        if (any || (lease && strcmp(entry->lease, lease))) return i;
    }
    return -1;
}
static void testify(int gpu) {
    char path[600], line[256];
    int other = stranger_on(gpu, 0);
    if (other < 0) return;
    snprintf(path, sizeof path, "%s/violations", machine_directory);
    int length = snprintf(line, sizeof line, "GPU %d: pid %d of lease %s beside pid %d of lease %s in state %d\n", gpu, getpid(),
                          getenv("GPULEASE_LEASE_ID"), machine->entry[other].pid, machine->entry[other].lease, machine->entry[other].state);
    int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0 || write(file, line, length) != length) broken(path);
    close(file);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    DEVICE(device);
    int gpu = shown[device];
    *context = &contexts[gpu];
    if (contexts[gpu] >= 0) return SUCCESS;
    if (reach(gpu)) return UNKNOWN;
    if (machine->gpu[gpu].mode == PROHIBITED) return DEVICES_BUSY;
    if (machine->gpu[gpu].mode == EXCLUSIVE_PROCESS && stranger_on(gpu, 1) >= 0) return DEVICES_BUSY;
    /* A context uses the GPU from the start of its creation, so violations are checked before and after. */
    contexts[gpu] = new_entry(COMPUTE, gpu, CONTEXT_BYTES);
    testify(gpu);
    for (int call = 0; call < CONTEXT_CALLS; call++) hold_driver(machine->context_us / CONTEXT_CALLS);
    testify(gpu);
    return SUCCESS;
}
int cuCtxSetCurrent(void *context) { current = (int)((int *)context - contexts); return SUCCESS; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    int code = cuDevicePrimaryCtxRetain(context, device);
    return code ? code : cuCtxSetCurrent(*context);
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE(device);
    int gpu = shown[device];
    if (contexts[gpu] < 0) return UNKNOWN;
    set_alive(contexts[gpu], F_UNLCK);
    contexts[gpu] = -1;
    return SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (current < 0 || contexts[current] < 0) return NOT_INITIALIZED;
    if (reach(current)) return UNKNOWN;
    if (used_bytes(current) + (int64_t)bytes > 79LL << 30) return OUT_OF_MEMORY;
    machine->entry[contexts[current]].bytes += bytes;
    *address = 0x7f0000000000;
    return SUCCESS;
}
