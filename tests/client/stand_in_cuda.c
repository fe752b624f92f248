/* A stand-in for libcuda.so.1: what the driver does with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, without a GPU.

   STAND_IN_CUDA    the machine in PCI order: "<32 hex digits>:<speed>:<kind>,..." with kind
                    g (a GPU), m (in MIG mode: a slice is shown in its place), u (in MIG mode without a slice: not shown)
   STAND_IN_READS   how it reads what NVIDIA does not document. "strict": as torch's parser does. "lax": forgives spaces,
                    upper case and mixed forms, and passes over a GPU that was named before.
   STAND_IN_FAILS   cuInit answers with this error; "hang": it never comes back; "dies": the process ends.
                    The path of a file: it says which, at each cuInit; an empty one is no error.
   STAND_IN_CALLS   a file to which every cuInit and every context is written: "<call> <pid>".

   Like the driver it reads the environment once, in cuInit; answers error 3 before; and after a fork answers error 3 to
   everything in the child, cuInit included. -DOLD: a driver before 11.4, without cuDeviceGetUuid_v2. */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 16, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101 };
struct gpu { char hex[33]; int speed; char kind; int bus; };

static struct gpu machine[MOST], shown[MOST];
static int machine_count, shown_count;
static pid_t initialised_by;

static const char *variable(const char *name) { const char *text = getenv(name); return text ? text : ""; }

static void note(const char *call) {
    char line[64];
    int length = snprintf(line, sizeof line, "%s %d\n", call, (int)getpid());
    int file = open(variable("STAND_IN_CALLS"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file >= 0) { if (write(file, line, length) != length) abort(); close(file); }
}

static void read_machine(void) {
    char text[2048], *rest = text, *word;
    snprintf(text, sizeof text, "%s", variable("STAND_IN_CUDA"));
    machine_count = 0;
    for (int bus = 0; machine_count < MOST && (word = strsep(&rest, ",")) && *word; bus++) {
        struct gpu *gpu = &machine[machine_count];
        if (sscanf(word, "%32[0-9a-f]:%d:%c", gpu->hex, &gpu->speed, &gpu->kind) != 3) abort();
        gpu->bus = bus;
        if (gpu->kind != 'u') machine_count++;
    }
    if (strcmp(variable("CUDA_DEVICE_ORDER"), "PCI_BUS_ID") == 0) return;
    for (int i = 1; i < machine_count; i++)  /* fastest first; those of one speed stay in PCI order */
        for (int j = i; j > 0 && machine[j].speed > machine[j - 1].speed; j--) {
            struct gpu slower = machine[j - 1];
            machine[j - 1] = machine[j];
            machine[j] = slower;
        }
}

/* Position of the one GPU whose UUID begins so; -1 if there is none or more than one. */
static int by_uuid(const char *entry, int lax) {
    char wanted[64] = "";
    int length = 0, found = -1;
    if (lax ? strncasecmp(entry, "GPU-", 4) : strncmp(entry, "GPU-", 4)) return -1;
    for (const char *at = entry + 4; *at && length < 63; at++)
        if (*at != '-') wanted[length++] = lax ? tolower(*at) : *at;
    for (int i = 0; i < machine_count; i++)
        if (machine[i].kind == 'g' && strncmp(machine[i].hex, wanted, length) == 0) {
            if (found >= 0) return -1;
            found = i;
        }
    return found;
}

static int by_index(const char *entry) {
    char *end;
    while (isspace(*entry)) entry++;
    long index = strtol(entry, &end, 10);
    return end == entry || index < 0 || index >= machine_count ? -1 : (int)index;
}

static void apply_mask(void) {
    int lax = strcmp(variable("STAND_IN_READS"), "lax") == 0, taken[MOST] = {0};
    char text[1024], *rest = text, *entry;
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    shown_count = 0;
    if (!mask) {
        memcpy(shown, machine, sizeof machine);
        shown_count = machine_count;
        return;
    }
    snprintf(text, sizeof text, "%s", mask);
    int uuids = strncmp(text, "GPU-", 4) == 0;
    while ((entry = strsep(&rest, ","))) {
        while (lax && isspace(*entry)) entry++;
        int found = (lax ? !isdigit(*entry) : uuids) ? by_uuid(entry, lax) : by_index(entry);
        if (found < 0) return;
        if (taken[found] && lax) continue;
        if (taken[found]) { shown_count = 0; return; }
        taken[found] = 1;
        shown[shown_count++] = machine[found];
    }
}

int cuInit(unsigned flags) {
    const char *fails = variable("STAND_IN_FAILS");
    char said[16] = "";
    if (*fails == '/') {
        FILE *file = fopen(fails, "r");
        if (file) { if (!fgets(said, sizeof said, file)) *said = 0; fclose(file); }
        fails = said;
    }
    note("cuInit");
    if (flags) return INVALID_VALUE;
    if (initialised_by) return initialised_by == getpid() ? 0 : NOT_INITIALIZED;
    if (strcmp(fails, "hang") == 0) for (;;) pause();
    if (strcmp(fails, "dies") == 0) { fprintf(stderr, "the driver fell over\n"); abort(); }
    if (*fails) return atoi(fails);
    read_machine();
    apply_mask();
    if (!shown_count) return NO_DEVICE;
    initialised_by = getpid();
    return 0;
}

static int state(void) { return initialised_by == getpid() ? 0 : NOT_INITIALIZED; }

int cuDeviceGetCount(int *count) {
    if (state()) return state();
    *count = shown_count;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    if (state()) return state();
    if (ordinal < 0 || ordinal >= shown_count) return INVALID_DEVICE;
    *device = ordinal;
    return 0;
}

static int uuid(unsigned char *bytes, int device, int of_the_slice) {
    if (state()) return state();
    if (device < 0 || device >= shown_count) return INVALID_DEVICE;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (sscanf(shown[device].hex + 2 * i, "%2x", &byte) != 1) abort();
        bytes[i] = byte;
    }
    if (of_the_slice && shown[device].kind == 'm') bytes[0] ^= 0xff;
    return 0;
}

int cuDeviceGetUuid(unsigned char *bytes, int device) { return uuid(bytes, device, 0); }
#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) { return uuid(bytes, device, 1); }
#endif

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    if (state()) return state();
    if (device < 0 || device >= shown_count) return INVALID_DEVICE;
    snprintf(text, length, "0000:%02X:00.0", 0x10 + shown[device].bus);
    return 0;
}

int cuDeviceGetName(char *text, int length, int device) {
    if (state()) return state();
    if (device < 0 || device >= shown_count) return INVALID_DEVICE;
    snprintf(text, length, "Stand-in %d", shown[device].speed);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { (void)context; (void)device; note("context"); return state(); }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags; return cuDevicePrimaryCtxRetain(context, device); }
