/* The machine that the stand-in libraries share: eight GPUs, and what processes have open on them.

   A machine is a directory. It holds the libraries themselves, which find it by their own path, and
     machine     the state below, mapped into every process that uses a library and into the test that owns it
     locks       byte 0 is the driver's own lock ("RM lock"), byte 1 guards the table of entries
     clients     one byte per entry, locked for as long as the entry's open file exists
     nvidiaN     the device files, which are empty
     violations  one line per context that was created on a GPU that another lease still used

   What a process has open is an entry: a client (the process itself, with the device files it has open) or a context on a
   GPU. An entry ends as an open device file does: when the last descriptor is closed, including one that a forked child has
   inherited. An open-file-description lock does just that, however the process ends. The simulated kernel (machine.py)
   notices the released lock, and removes the entry from the lists and its memory from the GPU, each after a while. */
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8, ENTRIES = 256, XIDS = 256, LEASE = 64, DEVICE_BYTES = 4096 };
enum { FREE, LIVE, DYING, UNLISTED };        /* state of an entry: DYING is still listed, UNLISTED still has its memory */
enum { CLIENT, COMPUTE, GRAPHICS };          /* kind of an entry */
enum { RM, TABLE };                          /* bytes of `locks` */
enum { SUCCESS = 0, LOST = 15, SECOND_NS = 1000000000 };

struct gpu {
    int32_t lost;              /* it has fallen off the bus */
    int32_t fabric;            /* NVML's state of the fabric: 0 has none, 1 not started, 2 in progress, 3 completed */
    int32_t recovery;          /* NVML's number of the recovery action */
    int32_t mode;              /* compute mode */
    int64_t blocked_until_ns;  /* calls that concern it do not come back before */
    int64_t kept_bytes;        /* memory in use that no process has */
};
struct entry {
    int32_t state, kind, pid, gpu;
    uint32_t opened;           /* bit N: it has the device file of GPU N open */
    int32_t unused;
    int64_t bytes, made_ns;
    char lease[LEASE];         /* GPULEASE_LEASE_ID of the process */
};
struct machine {
    uint32_t size;             /* of this struct: the test's picture of it must be the same */
    int32_t attach_us;         /* first handle of each GPU in a process: seconds without persistence mode */
    int32_t list_us;           /* one process list, under the RM lock */
    int32_t list_each_us;      /* and for each context of the machine */
    int32_t context_us;        /* making a context: many calls, each under the RM lock */
    uint32_t xids;             /* how many there have been */
    struct { int32_t gpu, xid; } xid[XIDS];
    struct gpu gpu[GPUS];
    struct entry entry[ENTRIES];
};

static struct machine *machine;
static char machine_directory[512];
static int locks_file = -1, clients_file = -1, client_entry = -1, device_files[GPUS];
static pid_t client_pid;
static pthread_mutex_t in_this_process = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)SECOND_NS + now.tv_nsec;
}
static void broken(const char *what) { perror(what); abort(); }

static int open_here(const char *name) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", machine_directory, name);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) broken(path);
    return file;
}

static void attach(void) {
    if (machine) return;
    Dl_info own;
    if (!dladdr((void *)attach, &own)) abort();
    snprintf(machine_directory, sizeof machine_directory, "%s", own.dli_fname);
    *strrchr(machine_directory, '/') = 0;
    int file = open_here("machine");
    machine = mmap(NULL, sizeof *machine, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (machine == MAP_FAILED || machine->size != sizeof *machine) broken("machine");
    locks_file = open_here("locks");
}

/* A record lock ends with the process, and no child inherits it. It does not keep threads apart: the mutex does. */
static void lock(int byte, int type) {
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    if (type != F_UNLCK) pthread_mutex_lock(&in_this_process);
    while (fcntl(locks_file, F_SETLKW, &range))
        if (errno != EINTR) broken("locks");
    if (type == F_UNLCK) pthread_mutex_unlock(&in_this_process);
}
static void take(int byte) { lock(byte, F_WRLCK); }
static void give(int byte) { lock(byte, F_UNLCK); }

/* Spend time in the driver while everybody else waits for it. */
static void hold_driver(int64_t microseconds) {
    take(RM);
    usleep(microseconds);
    give(RM);
}

static void set_alive(int entry, int type) {
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = entry, .l_len = 1};
    if (fcntl(clients_file, F_OFD_SETLK, &range)) broken("clients");
}

static int new_entry(int kind, int gpu, int64_t bytes) {
    const char *lease = getenv("GPULEASE_LEASE_ID");
    int found = 0;
    take(TABLE);
    while (found < ENTRIES && machine->entry[found].state != FREE) found++;
    if (found == ENTRIES) abort();
    struct entry *entry = &machine->entry[found];
    memset(entry, 0, sizeof *entry);
    entry->kind = kind; entry->gpu = gpu; entry->bytes = bytes; entry->pid = getpid(); entry->made_ns = now_ns();
    snprintf(entry->lease, LEASE, "%s", lease ? lease : "");
    set_alive(found, F_WRLCK);
    __atomic_store_n(&entry->state, LIVE, __ATOMIC_RELEASE);
    give(TABLE);
    return found;
}

/* Be a client of the driver. A forked child becomes one of its own, and keeps what it has inherited open. */
static void become_client(void) {
    if (client_pid == getpid()) return;
    clients_file = open_here("clients");
    memset(device_files, -1, sizeof device_files);
    client_entry = new_entry(CLIENT, -1, 0);
    client_pid = getpid();
}
static void open_device(int gpu, int map) {
    char name[32];
    if (device_files[gpu] >= 0) return;
    snprintf(name, sizeof name, "nvidia%d", gpu ^ 1);  /* minor numbers are in another order than the PCI bus */
    device_files[gpu] = open_here(name);
    machine->entry[client_entry].opened |= 1u << gpu;
    usleep(machine->attach_us);
    if (map && mmap(NULL, DEVICE_BYTES, PROT_READ, MAP_SHARED, device_files[gpu], 0) == MAP_FAILED) broken(name);
}
static void close_client(void) {
    if (client_pid != getpid()) return;
    for (int gpu = 0; gpu < GPUS; gpu++)
        if (device_files[gpu] >= 0) close(device_files[gpu]);
    close(clients_file);
    client_pid = 0;
}

/* A call that concerns a GPU: it waits out a teardown that hangs, and fails on a GPU that is lost. */
static int reach(int gpu) {
    while (now_ns() < __atomic_load_n(&machine->gpu[gpu].blocked_until_ns, __ATOMIC_ACQUIRE)) usleep(5000);
    return machine->gpu[gpu].lost ? LOST : SUCCESS;
}
static int64_t used_bytes(int gpu) {
    int64_t sum = machine->gpu[gpu].kept_bytes;
    for (int i = 0; i < ENTRIES; i++)
        if (machine->entry[i].state != FREE && machine->entry[i].kind != CLIENT && machine->entry[i].gpu == gpu)
            sum += machine->entry[i].bytes;
    return sum;
}
static int is_listed(const struct entry *entry) {
    return (entry->state == LIVE || entry->state == DYING) && entry->kind != CLIENT;
}
static void uuid_of(int gpu, char *text, size_t size) {
    snprintf(text, size, "GPU-d0000000-0000-0000-0000-00000000000%x", gpu);
}
static void bus_id_of(int gpu, char *text, size_t size) { snprintf(text, size, "00000000:%02X:00.0", 0x10 + 8 * gpu); }
